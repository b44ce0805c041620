"""The model that a panel's controls choose: of the catalog, with changed sizes, or of a pasted Hugging Face config."""

from __future__ import annotations

import json
from typing import Any

from pydantic import PositiveInt

from shoal.base.errors import UsageError
from shoal.base.section import Section, validate
from shoal.spec.catalog import ModelShape, model_shape
from shoal.spec.catalog.models import model_names
from shoal.spec.config.model import ModelConfig
from shoal.spec.hugging_face import model_fields

OWN = "pasted"
"""Name of a model of a pasted config."""
SIZES = ("layers", "hidden", "heads", "ffn")


class ModelChoice(Section):
    """A model, as the controls of a panel describe it."""

    model: str = "llama-3-70b"
    """A model in the catalog."""

    config: str = ""
    """A Hugging Face ``config.json``, whose model replaces the catalog's."""

    layers: PositiveInt | None = None
    """Layers, if changed."""

    hidden: PositiveInt | None = None
    """Width of the residual stream, if changed."""

    heads: PositiveInt | None = None
    """Query heads, if changed; the number of key and value heads stays where it divides them."""

    ffn: PositiveInt | None = None
    """Width inside the feed-forward block, if changed."""

    def section(self) -> dict[str, Any]:
        """Return the section `model` of a run's config that creates the model.

        Raises:
            UsageError: the pasted config is no JSON object, or not of a family that shoal computes.
        """
        pasted = model_fields(_parse(self.config), "config.json") if self.config else {}
        fields: dict[str, Any] = {"name": OWN, **pasted} if self.config else {"name": self.model}
        changes = {name: getattr(self, name) for name in SIZES if getattr(self, name) is not None}
        if not self.config:
            known = model_shape(self.model)
            fields["vocab"] = known.vocab
            if self.heads and self.heads % known.kv_heads == 0 and known.kv_heads < known.heads:
                fields["kv_heads"] = known.kv_heads
        elif self.hidden or self.heads:
            fields.pop("head_dim", None)
        return fields | changes

    def shape(self, sequence_length: int) -> ModelShape:
        """Return the model's shape, for sequences of this length.

        Raises:
            UsageError: as for `section`; or sizes that do not fit together.
        """
        if not self.changed:
            return model_shape(self.model)
        section = validate(ModelConfig, self.section(), source="model", prefix="model")
        return section.shape(vocab=section.vocab or 1, sequence_length=sequence_length)

    @property
    def changed(self) -> bool:
        """Whether the model is not simply one of the catalog."""
        return bool(self.config or any(getattr(self, name) for name in SIZES))


def _parse(config: str) -> dict[str, Any]:
    try:
        found = json.loads(config)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"config.json: it is not JSON: {error}.\n  Paste the file of a model on the hub.") from None
    if not isinstance(found, dict):
        raise UsageError("config.json: it is no JSON object.\n  Paste the file of a model on the hub.")
    return found


def list_models() -> list[dict[str, Any]]:
    """Return the catalog's models with their sizes, in its order."""
    found = []
    for name in model_names():
        shape = model_shape(name)
        found.append({"name": name, "parameters": shape.parameters(), **describe_shape(shape)})
    return found


def describe_shape(shape: ModelShape) -> dict[str, Any]:
    """Return the sizes that the controls show."""
    sizes: dict[str, Any] = {name: getattr(shape, name) for name in SIZES}
    return sizes | {"experts": shape.experts and {"count": shape.experts.count}}
