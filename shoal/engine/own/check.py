"""Settings of a run that a model of one's own cannot have."""

from __future__ import annotations

from shoal.base.errors import UsageError
from shoal.engine.own.definition import OwnModel, OwnShape, load_own_model
from shoal.engine.own.optimizer import MakeOptimizer, check_optimizer
from shoal.engine.own.tensor.layers import SplitRanks
from shoal.engine.own.tensor.table import apply_table
from shoal.engine.sharding.loss import LossPlan
from shoal.pipeline.from_layout import build_layout_program
from shoal.spec.config import RunConfig
from shoal.spec.config.data import DataConfig
from shoal.spec.config.model import ModelConfig
from shoal.spec.config.sections import OptimizerConfig, TrainConfig
from shoal.spec.layout import Layout
from shoal.spec.number_formats import FORMATS
from shoal.spec.schedules import SLICED
from shoal.spec.sync_methods import COMPRESSED, LOCAL, UNSYNCHRONISED

OWN_LAYOUT = (
    "dp", "sync", "tp", "sequence_parallel", "ep", "etp", "zero", "zero_shard", "micro_batch", "bucket_mb", "overlap",
    "prefetch", "reshard_after_forward", "offload",
)  # fmt: skip
"""Fields of a layout that any module can have."""

OWN_PIPELINE = ("pp", "schedule", "virtual_stages", "stage_layers", "update_every")
"""Fields of a layout that a module with a pipeline can have."""


def check_own_model(config: RunConfig) -> OwnShape:
    """Load the run's own model, and reject settings that need to know its layers.

    Raises:
        UsageError: naming the setting.
    """
    if config.model != ModelConfig(name=config.model.name, module=config.model.module):
        raise UsageError("model.module gives the full model.\n  Leave all other fields of [model] but name out.")
    own, layout = load_own_model(config.model.module), config.parallel
    for name, field in Layout.model_fields.items():
        value, default = getattr(layout, name), field.default
        if name in OWN_PIPELINE and not own.pipeline and value != default:
            raise UsageError(f"parallel.{name} = {value!r} with model.module, whose layers shoal does not know.\n  "
                             "Give pipeline in its OwnModel: the names of modules that run one after the other.")
        if name == "recompute" and value == "full" and (own.blocks or own.pipeline):
            continue
        if name == "recompute" and value != default:
            raise UsageError(f"parallel.recompute = {value!r} with model.module.\n  Use 'full', and give blocks or "
                             "pipeline in its OwnModel: the modules that are computed again.")
        if name == "sync" and value in UNSYNCHRONISED:
            raise UsageError(f"parallel.sync = {value!r} with model.module, whose buffers are means over all replicas, "
                             f"and these do not wait.\n  Use {', '.join((*COMPRESSED, *LOCAL))}, or leave it out.")
        if name == "sync" and value != default and layout.ep > 1:
            raise UsageError(f"parallel.sync = {value!r} with parallel.ep and model.module, whose replicas exchange "
                             "tokens.\n  Leave one of them out.")
        if name not in (*OWN_LAYOUT, *OWN_PIPELINE) and value != default:
            raise UsageError(f"parallel.{name} = {value!r} with model.module, whose layers shoal does not know."
                             f"\n  Leave it out; {', '.join(OWN_LAYOUT)} work with any module.")
    if layout.pp > 1:
        check_own_pipeline(config)
    for name, field in DataConfig.model_fields.items():
        if name != "cache" and getattr(config.data, name) != field.get_default(call_default_factory=True):
            raise UsageError(f"data.{name} with model.module, whose OwnModel has its own samples.\n  Leave it out: "
                             "data, validation and collate of the OwnModel take the place of [data].")
    if (layout.ep > 1 or layout.etp) and layout.expert_tensor > 1:
        raise UsageError(f"parallel.etp = {layout.expert_tensor} with model.module, whose experts are not split (it is "
                         "tp if it is not set).\n  Set parallel.etp = 1.")
    if ranks := SplitRanks.alone(layout):
        check_split(own, config, ranks)
    for name in ("compile", "cuda_graphs", "attention"):
        value = getattr(config.train, name)
        if value != TrainConfig.model_fields[name].default:
            raise UsageError(f"train.{name} = {value!r} with model.module: leave it out, and do so in the module.")
    if FORMATS[config.train.precision].products != "compute":
        raise UsageError(f"train.precision = '{config.train.precision}' with model.module: its products are its own."
                         "\n  Choose fp32, bf16, fp16 or fp64.")
    if own.make_optimizer:
        check_own_optimizer(config, own.make_optimizer)
    if config.optimizer.name.startswith("sophia"):
        raise UsageError(f"optimizer.name = '{config.optimizer.name}' with model.module: it needs logits of tokens."
                         "\n  Choose another optimizer.")
    return OwnShape.describe(own)


def check_split(own: OwnModel, config: RunConfig, ranks: SplitRanks) -> None:
    """Reject a table or a plan that does not fit the model or the layout.

    Raises:
        UsageError: naming the setting.
    """
    layout, split = config.parallel, own.tensor_parallel
    if layout.tp == 1 or not isinstance(split, LossPlan):
        apply_table(own.build_empty(), split, ranks, experts=own.expert_parallel)
        return
    if layout.pp > 1 or layout.ep > 1 or layout.recompute != "none" or layout.sequence_parallel:
        raise UsageError("parallel.pp, ep, recompute or sequence_parallel with tensor_parallel = 'auto', whose "
                         "operators run one by one.\n  Leave them out, or give a table.")
    if not split.suits(layout.tp, layout.micro_batch, config.train.precision):
        raise UsageError(f"{layout.describe()} with micro_batch {layout.micro_batch} in {config.train.precision}: the "
                         f"operators were split for tp {split.plan.mesh.ranks} with micro_batch {split.micro_batch} in "
                         f"{split.precision}.\n  Plan again, with tensor_parallel = 'auto'.")


def check_own_optimizer(config: RunConfig, make: MakeOptimizer) -> None:
    """Reject settings that an optimizer of one's own cannot have; try it out.

    Raises:
        UsageError: naming the setting.
    """
    if config.optimizer.name != OptimizerConfig.model_fields["name"].default:
        raise UsageError(f"optimizer.name = '{config.optimizer.name}' with an OwnModel that has make_optimizer."
                         "\n  Leave one of them out.")
    formats = FORMATS[config.train.precision]
    if formats.widened or formats.narrow:
        raise UsageError(f"train.precision = '{config.train.precision}' with make_optimizer: only optimizers of shoal "
                         "round weights and states.\n  Choose fp32, bf16, fp16 or fp64.")
    check_optimizer(make, config.optimizer, sharded=config.parallel.zero > 0 or config.parallel.tp > 1)


def check_own_pipeline(config: RunConfig) -> None:
    """Reject what a pipeline of one's own modules cannot do.

    Raises:
        UsageError: naming the setting.
    """
    layout = config.parallel
    program = build_layout_program(layout, layout.microbatches(config.train.global_batch))
    if layout.schedule in SLICED or program.model_copies > 1:
        raise UsageError(f"parallel.schedule = {layout.schedule} with model.module: it slices sequences, or has "
                         "several copies of the model.\n  Use 1f1b, interleaved-1f1b, zb-h1, zb-v or another.")
