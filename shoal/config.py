"""The typed description of one run: what the TOML file and the command line set, and nothing else.

Every field has its meaning below it; ``shoal train --help`` prints them. Keys that do not exist are refused
with the nearest that does.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tomli_w
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    create_model,
)

from shoal.catalog import Experts, ModelShape, model_shape
from shoal.errors import UsageError, did_you_mean
from shoal.layout import Layout

RUN_FILE = "run.toml"
"""The name under which a run folder keeps its config."""

T = TypeVar("T", bound=BaseModel)


class Section(BaseModel):
    """Frozen, and closed: a key that does not exist is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


ExpertsConfig = create_model(
    "ExpertsConfig",
    __base__=Section,
    __doc__="Override any part of `Experts`; count makes a dense model one with experts.",
    **{
        name: (Annotated[(field.annotation, Field(), *field.metadata)] | None, Field(None, description=about))
        for name, field in Experts.model_fields.items()
        for about in [field.description]
    },
)


class ModelConfig(Section):
    """A shape from the catalog, any part of which can be overridden."""

    name: str = "tiny"
    """A model of the catalog: tiny, gpt2-124m, llama-3.2-1b, ..."""

    layers: PositiveInt | None = None
    """Override: number of transformer layers."""

    hidden: PositiveInt | None = None
    """Override: width of the residual stream."""

    heads: PositiveInt | None = None
    """Override: query heads."""

    kv_heads: PositiveInt | None = None
    """Override: key and value heads (default: as many as heads, where those are overridden)."""

    head_dim: PositiveInt | None = None
    """Override: width of one head (default: hidden / heads)."""

    ffn: PositiveInt | None = None
    """Override: width inside the feed-forward block."""

    vocab: PositiveInt | None = None
    """Override: token ids (default: the tokenizer's)."""

    tied: bool | None = None
    """Override: share the embedding with the output head."""

    experts: ExpertsConfig = ExpertsConfig()
    """Override: the experts in place of feed-forward blocks; docs/experts.md."""

    def shape(self, *, vocab: int, sequence_length: int) -> ModelShape:
        """The catalog's shape with the overrides, for a tokenizer of ``vocab`` ids and this sequence length.

        A gpt model gets a learned position for every token of the sequence, so a longer one than the catalog's adds
        parameters; it never gets fewer positions, so that a shorter sequence does not change the model.

        Raises:
            UsageError: unknown name, heads that do not fit, or a vocabulary smaller than the tokenizer's.
        """
        base = model_shape(self.name)
        changed = {k: v for k, v in self.model_dump(exclude={"name", "experts"}).items() if v is not None}
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
        shape = shape.model_copy(update={"experts": self._experts(shape)})
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
        gate = given.get("gate", values.get("gate"))
        if "gate" in given and gate in _EXPERTS_PER_TOKEN:
            values["per_token"] = _EXPERTS_PER_TOKEN[gate]
        experts = Experts(**values | given)
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
            if gate not in (None, "top-k") and value != Experts.model_fields[name].default:
                raise UsageError(f"model.experts.{name} = {value} is for the gate top-k, not for {gate}.\n"
                                 f"  Leave it out, or choose the gate top-k.")
        if gate == "expert-choice" and experts.balance_loss:
            raise UsageError(f"model.experts.balance_loss = {experts.balance_loss}: experts that choose get equally "
                             "many tokens.\n  Set it to 0.")
        return experts


_EXPERTS_PER_TOKEN = {"switch": 1, "gshard": 2}


class DataConfig(Section):
    """Where text comes from and how it becomes batches."""

    source: Literal["stdlib", "text", "jsonl", "parquet", "hub", "synthetic"] = "stdlib"
    """stdlib: the text of Python's own standard library. text, jsonl, parquet: files named by paths.
    hub: a Hugging Face dataset. synthetic: random tokens with uneven masks (for verification)."""

    paths: tuple[str, ...] = ()
    """Files, folders or globs (text, jsonl, parquet)."""

    field: str = "text"
    """The field that holds the text (jsonl, parquet, hub)."""

    dataset: str = ""
    """The data set's name on the hub (hub)."""

    tokenizer: str = "bytes"
    """bytes, or the path of a tokenizer.json (see `shoal data train-tokenizer`)."""

    sequence_length: PositiveInt = 256
    """s, tokens per sequence."""

    document_mask: bool = False
    """Keep attention and loss inside each document of a packed sequence."""

    validation_fraction: float = Field(0.02, gt=0, lt=0.5)
    """Part of the documents held out for validation."""

    sampler: Literal["even", "overlap", "pool"] = "even"
    """Which samples a replica takes: even, its part of every global batch; overlap, its own part of each epoch, which
    reaches into its neighbour's; pool, the next ones of a common queue. All but even need a relaxed parallel.sync."""

    overlap: NonNegativeFloat = 0.25
    """overlap: how far a part reaches into the next, as a share of its length."""

    cache: Path = Path("~/.cache/shoal")
    """Where tokenised shards are kept, keyed by content."""


Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    """The update rule and its learning-rate schedule."""

    name: Literal[
        "adamw", "adam", "sgd", "momentum", "adagrad", "radam", "adafactor", "adam8bit", "muon", "sage",
        "sophia-g", "sophia-h",
    ] = "adamw"
    """The update rule; docs/numerics.md has a table of them."""

    learning_rate: PositiveFloat = 1e-3
    """Peak learning rate."""

    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Adam's decay rates of the first and second moment."""

    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""

    momentum: Decay = 0.95
    """momentum and muon: decay rate of the sum of gradients."""

    nesterov: bool = False
    """momentum: look one step ahead (Sutskever et al. 2013)."""

    sensitivity_beta: Decay = 0.85
    """sage: decay rate of the running mean of sensitivities."""

    hessian_every: PositiveInt = 10
    """sophia: steps from one estimate of the Hessian's diagonal to the next (k)."""

    hessian_scale: PositiveFloat = 0.05
    """sophia: factor on that diagonal (gamma; its authors have 0.05 for sophia-g and 0.01 for sophia-h): the smaller,
    the more elements take a step of the whole learning rate."""

    rates: dict[str, PositiveFloat] = {}
    """Factors on the learning rate by pattern of parameter names, as in {"embed.*" = 0.5}; the first match counts."""

    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay, on matrices only (not on norms and biases)."""

    clip_norm: NonNegativeFloat = 1.0
    """Largest global gradient norm; 0 does not clip."""

    schedule: Literal["cosine", "linear", "wsd", "inverse-sqrt", "constant"] = "cosine"
    """After the warm-up: cosine or linear to the minimum; wsd (warm-up, stable, linear decay: Hu et al. 2024);
    inverse-sqrt, as 1 / sqrt(step) but not below the minimum (Vaswani et al. 2017); or constant."""

    warmup_steps: NonNegativeInt = 20
    """Steps of linear warm-up."""

    decay_fraction: float = Field(0.2, ge=0, le=1)
    """wsd: the last part of the run, in which the rate falls."""

    minimum: float = Field(0.1, ge=0, le=1)
    """Final learning rate as a part of the peak."""


Precision = Literal[  # as `shoal.precision.formats` has them
    "fp32", "bf16", "bf16-sums", "bf16-weights", "bf16-all", "fp16", "fp16-unscaled", "fp8", "mxfp8",
    "fp64", "fp64-fp16", "fp64-fp8", "fp64-mxfp8",
]


class TrainConfig(Section):
    """One training run."""

    steps: PositiveInt = 200
    """Optimizer steps."""

    global_batch: PositiveInt = 16
    """Sequences per step over all replicas: dp x micro_batch x micro-batches."""

    precision: Precision = "fp32"
    """The number formats of weights, products, gradient sums and moments; `shoal explain precision` has a table."""

    seed: NonNegativeInt = 0
    """Of the initial weights and of the order of the data."""

    attention: Literal["auto", "sdpa", "explicit"] = "auto"
    """The attention kernel; auto takes what was measured fastest for the device and dtype."""

    compile: bool = False
    """torch.compile each layer, and the loss where it is not split over ranks."""

    validate_every: NonNegativeInt = 100
    """Steps between validations; 0 validates only at the end."""

    validation_sequences: PositiveInt = 64
    """Sequences in one validation (rounded up to whole passes)."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes CUDA where there is one."""

    threads: NonNegativeInt = 0
    """CPU threads per rank; 0 shares the cores between the local ranks."""

    straggler: str = ""
    """Ranks made slow, as RANK=FACTOR with commas: 1=4 has rank 1 sleep for 3 times what its forwards and backwards
    took. Each rank's time spent computing and waiting is shown at the end."""

    pace: NonNegativeFloat = 0.0
    """Seconds that the forwards and backwards of a step take at least, by sleeping: more ranks than cores then behave
    as if each had its own machine."""

    dead: str = ""
    """Ranks that kill themselves (SIGKILL), as RANK@STEP with commas: to see which kind of synchronisation goes on."""

    transport: Literal["auto", "backend"] = "auto"
    """How CPU ranks of one host communicate: auto takes memory that they share, backend always gloo."""


class LossScaleConfig(Section):
    """The dynamic loss scale of fp16 (Micikevicius et al. 2018, section 3.2)."""

    initial: PositiveFloat = 2.0**16
    """Its first value."""

    growth: float = Field(2.0, ge=1)
    """What it is multiplied by after `interval` steps without an overflow."""

    backoff: float = Field(0.5, gt=0, lt=1)
    """What it is multiplied by after a step with one, which is skipped."""

    interval: PositiveInt = 2000
    """Steps in a row."""

    smallest: PositiveFloat = 1.0
    """Below this it does not go: a gradient that overflows even so ends the run."""


class Float8Config(Section):
    """How fp8 makes 8 bits of the inputs, weights and output gradients of the layers' products. The embedding and the
    head are never in 8 bits."""

    scales: Literal["tensor", "row", "block"] = "tensor"
    """What shares a scale: a whole tensor (of one micro-batch), a row of it, or a block of a row."""

    block: PositiveInt = 128
    """block: its elements; of weights block x block share one (DeepSeek-AI 2024, "DeepSeek-V3", section 3.3)."""

    amax: Literal["current", "delayed"] = "current"
    """Scales come from the numbers themselves, or from the largest of earlier steps (tensor)."""

    history: PositiveInt = 16
    """delayed: the earlier steps."""

    margin: NonNegativeInt = 0
    """delayed: octaves that are left free above the largest, for numbers that grow."""

    gradient: Literal["e5m2", "e4m3"] = "e5m2"
    """The format of output gradients; inputs and weights are in e4m3. mxfp8 has this setting too, and no other."""

    keep: tuple[str, ...] = ()
    """Patterns of linear layers that stay in the compute format, as in ["layers.0.*", "*.mlp.down"]."""


class RelaxedConfig(Section):
    """Data parallelism that does not sum every gradient exactly and at once: what parallel.sync chooses."""

    staleness: NonNegativeInt = 3
    """ps-ssp, sgp, wagma: steps that a replica may be ahead of what it waits for; 0 waits for it in every step."""

    staleness_aware: bool = True
    """ps-ssp, ps-async: divide the learning rate of an update by its staleness (Zhang et al. 2016)."""

    local_steps: PositiveInt = 10
    """local-sgd, diloco: steps of each replica between two averages (H)."""

    outer_learning_rate: PositiveFloat = 0.7
    """diloco: of the outer step, along the replicas' mean change."""

    outer_momentum: Decay = 0.9
    """diloco: Nesterov momentum of the outer step."""

    outer_int8: bool = False
    """local-sgd, diloco: the replicas' changes are exchanged as 8-bit integers."""

    block: PositiveInt = 256
    """onebit, int8, outer_int8: elements that have a scale of their own; with 1 nothing is lost, and nothing saved."""

    rank: PositiveInt = 4
    """powersgd: columns of the two factors of a gradient matrix (r)."""

    density: float = Field(0.01, gt=0, le=1)
    """topk: part of each gradient tensor's elements that are exchanged."""

    group: PositiveInt = 2
    """wagma: replicas that average in one step, an even number or all of them."""

    global_every: NonNegativeInt = 10
    """wagma: steps between averages over all replicas, for which everybody waits; 0 has none."""


class CheckpointConfig(Section):
    """What is kept on disk, and when."""

    every: NonNegativeInt = 100
    """Steps between checkpoints; 0 saves only at the end and on a stop."""

    keep: PositiveInt = 2
    """Newest checkpoints kept."""

    asynchronous: bool = True
    """Write in the background while training goes on."""


class MetricsConfig(Section):
    """What is recorded while training. JSONL is always written."""

    log_every: PositiveInt = 10
    """Steps between logged lines."""

    profile: bool = False
    """Record when each action of some steps begins and ends, on every rank, for `shoal report`."""

    profile_after: NonNegativeInt = 3
    """Steps before the first recorded one, which are slower."""

    profile_steps: PositiveInt = 10
    """Steps to record."""

    histograms: NonNegativeInt = 0
    """Steps between histograms of weights, gradients and activations, for `shoal report`; 0 records none."""

    tensorboard: bool = True
    """Write TensorBoard event files into the run folder."""

    wandb: str = ""
    """Weights & Biases project (needs the extra shoal[wandb])."""

    mlflow: str = ""
    """MLflow experiment (needs the extra shoal[mlflow])."""


class RunConfig(Section):
    """Everything that decides a run."""

    model: ModelConfig = ModelConfig()
    parallel: Layout = Layout()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    loss_scale: LossScaleConfig = LossScaleConfig()
    float8: Float8Config = Float8Config()
    relaxed: RelaxedConfig = RelaxedConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    metrics: MetricsConfig = MetricsConfig()


def load(path: str | Path) -> RunConfig:
    """Read a run's TOML.

    Raises:
        UsageError: no such file, not TOML, a key that does not exist (with the nearest that does), or a bad value.
    """
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"no such file: {path}")
    try:
        values = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from None
    return build(values, where=str(path))


def build(values: dict[str, Any], *, where: str = "config") -> RunConfig:
    """A `RunConfig` from plain nested values, with errors in the words of the file."""
    return validate(RunConfig, values, where=where)


def validate(section: type[T], values: dict[str, Any], *, where: str) -> T:
    """A section from plain values.

    Raises:
        UsageError: one line for each key that does not exist (with the nearest that does) and each bad value.
    """
    try:
        return section.model_validate(values)
    except ValidationError as error:
        raise UsageError("\n".join(f"{where}: {_explain(section, e)}" for e in error.errors())) from None


def _explain(section: Any, error: Any) -> str:
    keys = [k for k in error["loc"] if isinstance(k, str)]
    dotted = ".".join(keys)
    if error["type"] == "extra_forbidden":
        elsewhere = [f"{name}.{keys[-1]}" for name, field in section.model_fields.items()
                     if keys[-1] in getattr(field.annotation, "model_fields", {})]
        if elsewhere:
            return f"there is no key '{dotted}'; did you mean '{' or '.join(elsewhere)}'?"
        for key in keys[:-1]:
            section = section.model_fields[key].annotation
        return f"there is no key '{dotted}'; {did_you_mean(keys[-1], section.model_fields)}"
    return f"{dotted} = {error['input']!r}: {error['msg'][0].lower()}{error['msg'][1:]}"


def plain(config: BaseModel) -> dict[str, Any]:
    """Nested plain values without what is unset, fit for TOML and JSON."""
    return config.model_dump(mode="json", exclude_none=True)


def save(config: RunConfig, path: Path, *, new: bool = False) -> None:
    """Write a config as TOML that `load` reads back to the same.

    Args:
        new: the file must not be there (FileExistsError).
    """
    with open(path, "x" if new else "w") as file:
        file.write(tomli_w.dumps(plain(config)))
