"""Configuration of the model: a shape from the catalog, any part of which can be overridden."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BaseModel, Field, create_model

from shoal.base.errors import UsageError
from shoal.base.section import Section
from shoal.spec.catalog import Depths, Experts, ModelShape, model_shape

_EXPERTS_PER_TOKEN = {"switch": 1, "gshard": 2}  # default number of experts per token of these gates


def _override(of: type[BaseModel]) -> Callable[[type[Section]], type[Section]]:
    """Add the fields of a part of `ModelShape` to a section, all optional."""
    fields: dict[str, Any] = {}
    for name, field in of.model_fields.items():
        kind: Any = Annotated[(field.annotation, Field(), *field.metadata)]
        fields[name] = (kind | None, None)

    def with_fields(section: type[Section]) -> type[Section]:
        made = create_model(
            section.__name__, __base__=section, __doc__=section.__doc__, __module__=section.__module__, **fields
        )
        made.documented_in = of
        return made

    return with_fields


@_override(Experts)
class ExpertsConfig(Section):
    """Override any part of `Experts`; count turns a dense model into a mixture of experts."""


@_override(Depths)
class DepthsConfig(Section):
    """Override any part of `Depths`; capacity makes some layers process only part of the tokens."""


Width = Annotated[int, Field(gt=0, le=2**24)]


class ModelConfig(Section):
    """A shape from the catalog, any part of which can be overridden."""

    name: str = "tiny"
    """A model in the catalog: tiny, gpt2-124m, llama-3.2-1b, ..."""

    layers: Annotated[int, Field(gt=0, le=2**14)] | None = None
    """Override: number of transformer layers."""

    hidden: Width | None = None
    """Override: width of the residual stream."""

    heads: Width | None = None
    """Override: query heads."""

    kv_heads: Width | None = None
    """Override: key and value heads (default: equal to heads where heads is overridden)."""

    head_dim: Width | None = None
    """Override: width of one head (default: hidden / heads)."""

    ffn: Width | None = None
    """Override: width inside the feed-forward block."""

    vocab: Width | None = None
    """Override: vocabulary size (default: the tokenizer's)."""

    tied: bool | None = None
    """Override: share the embedding with the output head."""

    experts: ExpertsConfig = ExpertsConfig()
    """Override: experts that replace feed-forward blocks; see docs/experts.md."""

    depths: DepthsConfig = DepthsConfig()
    """Override: layers that process only some tokens; see docs/depths.md."""

    def shape(self, *, vocab: int, sequence_length: int) -> ModelShape:
        """Return the catalog's shape with the overrides, for a tokenizer of ``vocab`` ids and this sequence length.

        A gpt model has a learned position for every token of the sequence, so a sequence longer than the catalog's
        adds parameters. A shorter sequence does not remove positions and leaves the model unchanged.

        Raises:
            UsageError: unknown name, heads that do not fit, or a vocabulary smaller than the tokenizer's.
        """
        base = model_shape(self.name)
        changed = {k: v for k, v in self.model_dump(exclude={"name", "experts", "depths"}).items() if v is not None}
        changed.setdefault("vocab", vocab)
        if "heads" in changed and "kv_heads" not in changed:
            changed["kv_heads"] = changed["heads"]
        hidden, heads = changed.get("hidden", base.hidden), changed.get("heads", base.heads)
        if "head_dim" not in changed and ("hidden" in changed or "heads" in changed):
            if hidden % heads:
                raise UsageError(f"model.hidden = {hidden} is not a multiple of model.heads = {heads}.\n"
                                 f"  Change one of them, or set model.head_dim.")
            changed["head_dim"] = hidden // heads
        if base.family == "gpt":
            changed["max_sequence"] = max(base.max_sequence, sequence_length)
        shape = base.model_copy(update=changed)
        shape = shape.model_copy(update={"experts": self._experts(shape), "depths": self._depths(shape)})
        if shape.heads % shape.kv_heads:
            raise UsageError(f"model.kv_heads = {shape.kv_heads} does not divide model.heads = {shape.heads}: "
                             "each key/value head serves heads / kv_heads query heads.")
        if shape.head_dim % 2 and shape.family == "llama":
            raise UsageError(f"model.head_dim = {shape.head_dim} is odd: rotary positions turn pairs of numbers.")
        if shape.vocab < vocab:
            raise UsageError(f"model.vocab = {shape.vocab} is smaller than the tokenizer's {vocab} ids.\n"
                             "  Leave model.vocab out, or make it larger.")
        return shape

    def _experts(self, shape: ModelShape) -> Experts | None:
        given = self.experts.model_dump(exclude_none=True)
        if shape.experts is None and not given:
            return None
        if shape.experts is None and "count" not in given:
            name, value = next(iter(given.items()))
            raise UsageError(f"model.experts.{name} = {value}, but model {self.name} has no experts.\n"
                             "  Set model.experts.count, the experts of a layer.")
        values = {"ffn": shape.ffn} if shape.experts is None else shape.experts.model_dump()
        if (chosen := given.get("gate")) in _EXPERTS_PER_TOKEN:
            values["per_token"] = _EXPERTS_PER_TOKEN[chosen]
        experts = Experts(**values | given)
        gate = experts.gate
        if not experts.layers(shape.layers):
            raise UsageError(f"model.experts: of {shape.layers} layers none has experts with first = {experts.first} "
                             f"and every = {experts.every}.\n  Make them smaller.")
        if experts.per_token > experts.count:
            raise UsageError(f"model.experts.per_token = {experts.per_token} is more than model.experts.count = "
                             f"{experts.count}.\n  Nearest that works: {experts.count}.")
        if experts.per_token != (need := _EXPERTS_PER_TOKEN.get(gate, experts.per_token)):
            raise UsageError(f"model.experts.per_token = {experts.per_token}, but the gate {gate} takes {need}.\n"
                             f"  Leave it out, or choose the gate top-k.")
        for name in ("score", "normalise", "scale", "bias_update"):
            value = getattr(experts, name)
            if gate != "top-k" and value != Experts.model_fields[name].default:
                raise UsageError(f"model.experts.{name} = {value} is for the gate top-k, not for {gate}.\n"
                                 f"  Leave it out, or choose the gate top-k.")
        if gate == "expert-choice" and experts.balance_loss:
            raise UsageError(f"model.experts.balance_loss = {experts.balance_loss}: experts that choose get equally "
                             "many tokens.\n  Set it to 0.")
        return experts

    def _depths(self, shape: ModelShape) -> Depths | None:
        given = self.depths.model_dump(exclude_none=True)
        if shape.depths is None and not given:
            return None
        if shape.depths is None and "capacity" not in given:
            name, value = next(iter(given.items()))
            raise UsageError(f"model.depths.{name} = {value}, but all layers of model {self.name} take all tokens.\n"
                             "  Set model.depths.capacity, the part of the tokens that pass through a layer.")
        depths = Depths(**(shape.depths.model_dump() if shape.depths else {}) | given)
        if not depths.layers(shape.layers):
            raise UsageError(f"model.depths: of {shape.layers} layers none takes some tokens with first = "
                             f"{depths.first} and every = {depths.every}.\n  Make them smaller.")
        return depths
