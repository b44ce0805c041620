"""Configuration of the model: a shape from the catalog, any part of which can be overridden."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, create_model

from shoal.base.errors import UsageError
from shoal.base.section import Section
from shoal.spec.catalog import Depths, Experts, Latent, ModelShape, RopeScaling, model_names, model_shape
from shoal.spec.catalog.models import Width

NEEDED = ("family", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "max_sequence", "tied")
"""Fields that together give a model that is not in the catalog."""

P = TypeVar("P", bound=Section)

_EXPERTS_PER_TOKEN = {"switch": 1, "gshard": 2}  # default number of experts per token of these gates


def _override(of: type[BaseModel]) -> Callable[[type[Section]], type[Section]]:
    """Add the fields of `ModelShape` or of a part of it to a section, all optional, beside the section's own."""

    def with_fields(section: type[Section]) -> type[Section]:
        fields: dict[str, Any] = {}
        for name, field in of.model_fields.items():
            if name not in section.model_fields:
                kind: Any = Annotated[(field.annotation, Field(), *field.metadata)]
                fields[name] = (kind | None, None)
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


@_override(RopeScaling)
class RopeScalingConfig(Section):
    """Override any part of `RopeScaling`; factor rescales the rotary frequencies of a model without rescaled ones."""


@_override(Latent)
class LatentConfig(Section):
    """Override any part of `Latent`; key_value_rank gives a model latent attention."""


@_override(ModelShape)
class ModelConfig(Section):
    """A shape from the catalog, any part of which can be overridden."""

    name: str = "tiny"
    """A model in the catalog: tiny, gpt2-124m, llama-3.2-1b, ...; or a new name, if the shape is given in full."""

    module: str = ""
    """FILE.py:NAME of a `shoal.OwnModel`, a module of one's own that takes the place of a shape (docs/own-model.md)."""

    weights: Path | None = None
    """Folder of a model in Hugging Face's format, whose weights a new run starts with (docs/hugging-face.md)."""

    kv_heads: Width | None = None
    """Key and value heads; fewer than heads is grouped-query attention (default: heads, where that is given)."""

    head_dim: Width | None = None
    """Width of one head (default: hidden / heads where one of them is given)."""

    vocab: Width | None = None
    """v, vocabulary size (default: the tokenizer's)."""

    window: Annotated[int, Field(ge=0, le=2**24)] | None = None
    """Tokens that a query sees in local layers, its own included (Mistral); 0 turns a window off."""

    rope_scaling: RopeScalingConfig = RopeScalingConfig()
    """Rotary frequencies for longer sequences (Llama 3.1 and later)."""

    latent: LatentConfig = LatentConfig()
    """Multi-head latent attention (DeepSeek-V2 and V3); see docs/models.md."""

    experts: ExpertsConfig = ExpertsConfig()
    """Experts that replace feed-forward blocks; see docs/experts.md."""

    depths: DepthsConfig = DepthsConfig()
    """Layers that process only some tokens; see docs/depths.md."""

    @property
    def title(self) -> str:
        """The name; of a module without one, that of its file."""
        unnamed = self.module and self.name == ModelConfig.model_fields["name"].default
        return Path(self.module.partition(":")[0]).stem if unnamed else self.name

    def shape(self, *, vocab: int, sequence_length: int) -> ModelShape:
        """Return the catalog's shape with the overrides, for a tokenizer of ``vocab`` ids and this sequence length.

        A gpt model has a learned position for every token of the sequence, so a sequence longer than the catalog's
        adds parameters. A shorter sequence does not remove positions and leaves the model unchanged.

        Raises:
            UsageError: unknown name, heads that do not fit, a vocabulary smaller than the tokenizer's, or a module.
        """
        if self.module:
            raise UsageError(
                "model.module: this needs a shape of the catalog, and shoal does not know the layers of a module."
                "\n  `shoal train`, `estimate`, `verify` and `report` take any module, and shoal.Run(..., "
                'layout="auto") finds its layout (docs/own-model.md).'
                "\n  `shoal plan auto --module FILE.py:FUNCTION` splits its operators (docs/auto.md)."
            )
        parts = {"name", "module", "weights", "rope_scaling", "latent", "experts", "depths"}
        changed = {k: v for k, v in self.model_dump(exclude=parts).items() if v is not None}
        changed.setdefault("vocab", vocab)
        base = ModelShape(**changed) if self._is_complete() else model_shape(self.name)
        if "heads" in changed and "kv_heads" not in changed:
            changed["kv_heads"] = changed["heads"]
        hidden, heads = changed.get("hidden", base.hidden), changed.get("heads", base.heads)
        if "head_dim" not in changed and ("hidden" in changed or "heads" in changed):
            if hidden % heads:
                raise UsageError(f"model.hidden = {hidden} is not a multiple of model.heads = {heads}.\n"
                                 f"  Change one of them, or set model.head_dim.")
            changed["head_dim"] = hidden // heads
        if "window" in changed:
            changed["window"] = changed["window"] or None
        shape = base.model_copy(update=changed)
        if shape.family == "gpt":
            shape = shape.model_copy(update={"max_sequence": max(shape.max_sequence, sequence_length)})
        shape = shape.model_copy(update={
            "rope_scaling": self._rope_scaling(shape), "latent": self._latent(shape),
            "experts": self._experts(shape), "depths": self._depths(shape),
        })
        self._check(shape)
        if shape.vocab < vocab:
            raise UsageError(f"model.vocab = {shape.vocab} is smaller than the tokenizer's {vocab} ids.\n"
                             "  Leave model.vocab out, or make it larger.")
        return shape

    def _check(self, shape: ModelShape) -> None:
        """Raise UsageError if the fields contradict each other."""
        if shape.heads % shape.kv_heads:
            raise UsageError(f"model.kv_heads = {shape.kv_heads} does not divide model.heads = {shape.heads}: "
                             "each key/value head serves heads / kv_heads query heads.")
        if shape.pattern and shape.window is None:
            raise UsageError("model.pattern, but no layer has a window.\n  Set model.window, or leave pattern out.")
        for name, off in (("local_rope_theta", None), ("chunked", False), ("global_rope", True)):
            if getattr(shape, name) is not off and shape.window is None:
                raise UsageError(f"model.{name}, but no layer has a window.\n  Set model.window, or leave it out.")
        if shape.temperature and shape.global_rope:
            raise UsageError(f"model.temperature = {shape.temperature} is for layers without positions, and all have "
                             "some.\n  Set model.global_rope to false, or leave it out.")
        if shape.activation == "gelu" and shape.experts:
            raise UsageError("model.activation = 'gelu', but experts compute SwiGLU, plain or clamped.\n"
                             "  Leave it out, or set it to clamped.")
        for name in ("joint_qk_norm", "plain_qk_norm"):
            if getattr(shape, name) and not shape.qk_norm:
                raise UsageError(f"model.{name} without norms of queries and keys.\n  Set model.qk_norm too.")
        if shape.joint_qk_norm and shape.plain_qk_norm:
            raise UsageError("model.joint_qk_norm with model.plain_qk_norm: norms over all heads have weights.\n"
                             "  Leave one of them out.")
        for name in ("rope_scaling", "qkv_bias", "out_bias", "qk_norm", "post_norm", "activation", "sinks",
                     "local_rope_theta", "latent", "mtp_depth"):
            if shape.family != "llama" and getattr(shape, name):
                raise UsageError(f"model.{name}, but model {self.name} is of the family gpt.\n  Leave it out.")
        if shape.rotary_dim % 2 and shape.family == "llama":
            field = "latent.rotary_dim" if shape.latent else "head_dim"
            raise UsageError(f"model.{field} = {shape.rotary_dim} is odd: rotary positions turn pairs of numbers.")

    def _is_complete(self) -> bool:
        """Return whether the fields give a model that is not in the catalog."""
        return self.name not in model_names() and all(getattr(self, field) is not None for field in NEEDED)

    def _rope_scaling(self, shape: ModelShape) -> RopeScaling | None:
        scaling = _merge(RopeScaling, shape.rope_scaling, self.rope_scaling)
        if scaling is None:
            return None
        if scaling.low_frequency > scaling.high_frequency:
            raise UsageError(f"model.rope_scaling.low_frequency = {scaling.low_frequency:g} is above "
                             f"high_frequency = {scaling.high_frequency:g}.\n  Make it smaller.")
        return scaling

    def _latent(self, shape: ModelShape) -> Latent | None:
        latent = _merge(Latent, shape.latent, self.latent)
        if latent is None:
            return None
        for field in ("qkv_bias", "out_bias", "qk_norm", "query_scalar", "sinks", "local_rope_theta"):
            if getattr(shape, field):
                raise UsageError(f"model.{field} with model.latent: latent attention has no such part.\n"
                                 "  Leave one of them out.")
        if not shape.global_rope:
            raise UsageError("model.global_rope = false with model.latent: latent attention rotates in every layer.\n"
                             "  Leave one of them out.")
        if shape.kv_heads != shape.heads:
            raise UsageError(f"model.kv_heads = {shape.kv_heads} with model.latent: every head has its own keys and "
                             f"values.\n  Set model.kv_heads = model.heads = {shape.heads}.")
        if latent.value_dim and latent.value_dim > (widest := shape.head_dim + latent.rotary_dim):
            raise UsageError(f"model.latent.value_dim = {latent.value_dim} is wider than a query, head_dim + "
                             f"latent.rotary_dim = {widest}.\n  Make it smaller.")
        return latent

    def _experts(self, shape: ModelShape) -> Experts | None:
        defaults: dict[str, int] = {"ffn": shape.ffn} if shape.experts is None else {}
        if (gate := self.experts.model_dump()["gate"]) in _EXPERTS_PER_TOKEN:
            defaults["per_token"] = _EXPERTS_PER_TOKEN[gate]
        experts = _merge(Experts, shape.experts, self.experts, defaults)
        if experts is None:
            return None
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
        if experts.scales_input and experts.per_token > 1:
            raise UsageError(f"model.experts.scales_input with model.experts.per_token = {experts.per_token}: a token "
                             "has one expert then.\n  Set per_token to 1, or leave scales_input out.")
        if experts.count % experts.groups:
            raise UsageError(f"model.experts.groups = {experts.groups} does not divide model.experts.count = "
                             f"{experts.count}.\n  Choose a divisor.")
        if experts.per_token > (within := min(experts.groups_per_token, experts.groups) *
                                experts.count // experts.groups):
            raise UsageError(f"model.experts.per_token = {experts.per_token}, but model.experts.groups_per_token = "
                             f"{experts.groups_per_token} groups have {within} experts.\n  Take more groups.")
        for name in ("groups", "score", "normalise", "scale", "biases", "bias_update", "scales_input"):
            value = getattr(experts, name)
            if gate != "top-k" and value != Experts.model_fields[name].default:
                raise UsageError(f"model.experts.{name} = {value} is for the gate top-k, not for {gate}.\n"
                                 f"  Leave it out, or choose the gate top-k.")
        if gate == "expert-choice" and experts.balance_loss:
            raise UsageError(f"model.experts.balance_loss = {experts.balance_loss}: experts that choose get equally "
                             "many tokens.\n  Set it to 0.")
        return experts

    def _depths(self, shape: ModelShape) -> Depths | None:
        depths = _merge(Depths, shape.depths, self.depths)
        if depths is None:
            return None
        if not depths.layers(shape.layers):
            raise UsageError(f"model.depths: of {shape.layers} layers none takes some tokens with first = "
                             f"{depths.first} and every = {depths.every}.\n  Make them smaller.")
        return depths


_FIRST = {
    Experts: ("experts", "count"), Depths: ("depths", "capacity"), RopeScaling: ("rope_scaling", "factor"),
    Latent: ("latent", "key_value_rank"),
}  # fmt: skip
"""Name of each optional part of a model, and the field that gives a model this part."""


def _merge(part: type[P], base: P | None, overrides: Section, defaults: Mapping[str, Any] = {}) -> P | None:
    """Return a part of the catalog's model with the defaults and overrides; None if the model has no such part.

    Raises:
        UsageError: the model has no such part, and the field that would give it one is missing.
    """
    given = overrides.model_dump(exclude_none=True)
    if base is None and not given:
        return None
    name, first = _FIRST[part]
    if base is None and first not in given:
        field, value = next(iter(given.items()))
        raise UsageError(f"model.{name}.{field} = {value}, but the model has no {name}.\n"
                         f"  Set model.{name}.{first} too.")
    return part(**{**(base.model_dump() if base else {}), **defaults, **given})
