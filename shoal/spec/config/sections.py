"""Sections of a run's config, except its model and layout."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from shoal.base.section import Section

OptimizerName = Literal[
    "adamw", "adam", "sgd", "momentum", "adagrad", "radam", "adafactor", "adam8bit", "muon", "sage", "sophia-g",
    "sophia-h",
]
Decay = Annotated[float, Field(ge=0, lt=1)]
Precision = Literal[  # the keys of `shoal.spec.number_formats.FORMATS`
    "fp32", "bf16", "bf16-sums", "bf16-moments", "bf16-weights", "bf16-all", "fp16", "fp16-unscaled", "fp8", "mxfp8",
    "nvfp4", "fp64", "fp64-fp16", "fp64-fp8", "fp64-mxfp8", "fp64-nvfp4",
]
LARGEST_SCALE = 2.0**100  # scale of a loss that never overflows


class TrainConfig(Section):
    """Length, batch, precision and devices of a training run."""

    steps: PositiveInt = 200
    """Number of optimizer steps."""

    global_batch: PositiveInt = 16
    """Sequences per step over all replicas: dp x micro_batch x micro-batches."""

    precision: Precision = "fp32"
    """Number formats of weights, products, gradient sums and moments; see `shoal explain precision`."""

    seed: NonNegativeInt = 0
    """Random seed of the initial weights and of the data order."""

    attention: Literal["auto", "sdpa", "explicit"] = "auto"
    """The attention kernel; auto chooses the one measured fastest for the device and dtype."""

    compile: bool = False
    """Use torch.compile for each layer (experts excepted), the loss (unless split over ranks), and update rules that
    gain from it."""

    cuda_graphs: bool = False
    """With compile, record the kernels of each layer as CUDA graphs and replay them (torch's mode reduce-overhead), for
    models so small that launching kernels takes longer than computing."""

    validate_every: NonNegativeInt = 100
    """Steps between validations; 0 validates only at the end."""

    validation_sequences: PositiveInt = 64
    """Sequences per validation (rounded up to complete passes)."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device type; auto chooses CUDA if available."""

    threads: int = Field(default=0, ge=0, le=4096)
    """CPU threads per rank; 0 divides the cores between the local ranks."""

    transport: Literal["auto", "backend"] = "auto"
    """Transport between CPU ranks of one host: auto uses shared memory, backend always uses gloo."""


class OptimizerConfig(Section):
    """The update rule and its learning-rate schedule."""

    name: OptimizerName = "adamw"
    """The update rule; see the table in docs/numerics.md."""

    learning_rate: PositiveFloat = 1e-3
    """Peak learning rate."""

    from_weights: bool = False
    """adam and adamw: start with the moments and number of updates that model.weights has (a checkpoint of torch)."""

    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """adam, adamw, radam, adam8bit, sage, and muon's AdamW: decay rates of the first and second moment. sophia: decay
    rates of the gradient and of the Hessian diagonal."""

    eps: PositiveFloat = 1e-8
    """The same rules and adagrad: added to the square root of the second moment. sophia: lower bound of hessian_scale
    times the Hessian diagonal."""

    momentum: Decay = 0.95
    """momentum and muon: decay rate of the gradient sum."""

    nesterov: bool = False
    """momentum: use Nesterov momentum (Sutskever et al. 2013), as muon always does."""

    sensitivity_beta: Decay = 0.85
    """sage: decay rate of the running mean of sensitivities."""

    hessian_every: PositiveInt = 10
    """sophia: steps between estimates of the Hessian diagonal (k)."""

    hessian_scale: PositiveFloat = 0.05
    """sophia: factor on the Hessian diagonal (gamma; the authors use 0.05 for sophia-g and 0.01 for sophia-h). The
    smaller it is, the more elements take a step of the full learning rate."""

    lr_factors: dict[str, PositiveFloat] = Field(default={})
    """Factors on the learning rate by parameter-name pattern, such as {"embed.*" = 0.5}; the first match applies."""

    weight_decay: NonNegativeFloat = 0.1
    """Weight decay of matrices (not of norms and biases), decoupled and multiplied by the learning rate (Loshchilov &
    Hutter 2019). For adam, adagrad and momentum it is added to the gradient."""

    clip_norm: NonNegativeFloat = 1.0
    """Maximum global gradient norm; 0 turns clipping off."""

    schedule: Literal["cosine", "linear", "wsd", "inverse-sqrt", "constant"] = "cosine"
    """Learning rate after the warm-up: cosine or linear to the minimum; wsd (warm-up, stable, linear decay: Hu et al.
    2024); inverse-sqrt, 1 / sqrt(step) but at least the minimum (Vaswani et al. 2017); or constant."""

    warmup_steps: NonNegativeInt = 20
    """Steps of linear warm-up."""

    decay_fraction: float = Field(default=0.2, ge=0, le=1)
    """wsd: fraction of the steps after the warm-up in which the rate decays, at the end."""

    min_lr_fraction: float = Field(default=0.1, ge=0, le=1)
    """Final learning rate as a fraction of the peak."""


class LossScaleConfig(Section):
    """The dynamic loss scale of fp16 (Micikevicius et al. 2018, section 3.2)."""

    initial: float = Field(default=2.0**16, gt=0, le=LARGEST_SCALE)
    """Initial scale."""

    growth: float = Field(default=2.0, ge=1)
    """Factor on the scale after `interval` consecutive steps without an overflow."""

    backoff: float = Field(default=0.5, gt=0, lt=1)
    """Factor on the scale after a step with an overflow, which is skipped."""

    interval: PositiveInt = 2000
    """Consecutive steps without an overflow before the scale grows."""

    smallest: float = Field(default=1.0, gt=0, le=LARGEST_SCALE)
    """Minimum scale. A gradient that overflows at this scale ends the run."""


class Float8Config(Section):
    """Quantisation of the inputs, weights and output gradients of linear layers by fp8. The embedding and the head are
    never quantised."""

    scales: Literal["tensor", "row", "block"] = "tensor"
    """Elements that share a scale: a full tensor (of one micro-batch), a row of it, or a block of a row."""

    block: PositiveInt = 128
    """block: elements per block; weights use block x block tiles (DeepSeek-AI 2024, "DeepSeek-V3", section 3.3)."""

    amax: Literal["current", "delayed"] = "current"
    """Source of the scales: the current values, or the largest values of earlier steps (tensor)."""

    history: PositiveInt = 16
    """delayed: number of earlier steps."""

    margin: int = Field(default=0, ge=0, le=32)
    """delayed: octaves of headroom above the largest value, for values that grow."""

    gradient: Literal["e5m2", "e4m3"] = "e5m2"
    """The format of output gradients; inputs and weights use e4m3. mxfp8 only reads this setting and keep, nvfp4 only
    keep."""

    keep: tuple[str, ...] = ()
    """Patterns of linear layers that stay in the compute format, such as ["layers.0.*", "*.mlp.down"]."""


class RelaxedConfig(Section):
    """Relaxed data parallelism: methods of parallel.sync that do not sum every gradient exactly in every step."""

    staleness: NonNegativeInt = 3
    """ps-ssp, sgp, wagma: maximum steps that a replica may be ahead of the ones it waits for; 0 waits in every step."""

    staleness_aware: bool = True
    """ps-ssp, ps-async: divide the learning rate of an update by its staleness (Zhang et al. 2016)."""

    local_steps: PositiveInt = 10
    """local-sgd, diloco: steps of each replica between averages (H)."""

    outer_learning_rate: PositiveFloat = 0.7
    """diloco: learning rate of the outer step, along the replicas' mean change."""

    outer_momentum: Decay = 0.9
    """diloco: Nesterov momentum of the outer step."""

    outer_int8: bool = False
    """local-sgd, diloco: exchange the replicas' changes as 8-bit integers."""

    block: PositiveInt = 256
    """onebit, int8, outer_int8: elements that share a scale; 1 is lossless and saves nothing."""

    rank: PositiveInt = 4
    """powersgd: columns of the two factors of a gradient matrix (r)."""

    density: float = Field(default=0.01, gt=0, le=1)
    """topk: fraction of each gradient tensor's elements that is exchanged."""

    group: PositiveInt = 2
    """wagma: replicas that average together in one step, an even number or all of them."""

    global_every: NonNegativeInt = 10
    """wagma: steps between averages over all replicas, which all replicas wait for; 0 makes none."""


class CheckpointConfig(Section):
    """Checkpoints on disk."""

    every: NonNegativeInt = 100
    """Steps between checkpoints; 0 saves only at the end and when the run is stopped."""

    keep: PositiveInt = 2
    """Number of newest checkpoints to keep; as many as train.steps keep all."""

    asynchronous: bool = True
    """Write in the background while training continues."""

    folder: str = ""
    """Folder of the checkpoints (default: the run folder): a path, or an fsspec URL such as s3://bucket/run. Use one
    folder for each run."""


class MetricsConfig(Section):
    """Metrics recorded while training. JSONL is always written."""

    log_every: PositiveInt = 10
    """Steps between logged lines; the first step, the last one and steps with validation are also logged."""

    profile: bool = False
    """Record the start and end of each action for some steps, on every rank, for `shoal report`."""

    trace: bool = False
    """Record the same steps with torch's profiler: operators and kernels of each rank, for Perfetto."""

    profile_after: NonNegativeInt = 3
    """Steps before the first recorded one; the first steps are slower."""

    profile_steps: PositiveInt = 10
    """Number of steps to record."""

    histograms: NonNegativeInt = 0
    """Steps between histograms of weights, gradients and activations, for `shoal report`; 0 records none."""

    sample_prompt: str | None = None
    """Text that the trained model continues at the end of a run, to show what it learned (default: some held-out words
    of its data); empty generates none."""

    tensorboard: bool = True
    """Write TensorBoard event files into the run folder."""

    wandb: str = ""
    """Weights & Biases project (needs the extra shoal[wandb])."""

    mlflow: str = ""
    """MLflow experiment (needs the extra shoal[mlflow])."""


class FailoverConfig(Section):
    """Recovery from the loss of ranks and nodes; see docs/failover.md."""

    # ---- restarts ----

    restarts: NonNegativeInt = 3
    """Consecutive restarts without progress after which a run ends; 0 never restarts it."""

    heartbeat_timeout_seconds: PositiveFloat = 10.0
    """Seconds without heartbeat or CPU use after which a rank is declared dead (2 seconds if stopped by SIGSTOP)."""

    progress_timeout_seconds: PositiveFloat = 20.0
    """Seconds without progress on any rank, and at least three times the slowest step, after which a run is declared
    stuck. Before the first step, during validation and while saving the limit is nine minutes."""

    recovery_timeout_seconds: NonNegativeFloat = 10.0
    """Seconds in which the survivors of a lost rank must leave their step, and must meet the new ranks. Survivors keep
    their processes; one that takes longer is replaced too. 0 replaces all ranks after every failure."""

    spares: NonNegativeInt = 0
    """Processes that wait, with all imports done, for the place of a lost rank. They hold no device and no state."""

    shrink: Literal["never", "replicas"] = "never"
    """Whether a run that lacks processes continues with fewer replicas, and the same global batch, while they are
    replaced. They join after a step, with the state from memory. Not under torchrun and SLURM."""

    replan: bool = True
    """Restart on fewer devices after a loss, and on all of them when they return, with the layout nearest to parallel.
    Without it, a run that lacks devices ends."""

    # ---- checkpoints in host memory ----

    memory_every: NonNegativeInt = 0
    """Steps between copies of the state in host memory. A restart resumes from the newest copy, so at most this many
    steps are lost. 0 makes none."""

    memory_folder: Path = Path("/dev/shm")
    """Folder on each host in an in-memory file system (tmpfs)."""

    node_ranks: NonNegativeInt = 0
    """Ranks per node, numbered in order; another node keeps a copy of a node's state. 0 takes each host's ranks."""

    # ---- silent failures ----

    check_replicas_every: NonNegativeInt = 0
    """Steps between comparisons of the replicas' states, also compared at the start; 0 never compares them."""

    spike_factor: NonNegativeFloat = 0.0
    """Report a spike when the loss or gradient norm exceeds its running median by this many robust standard
    deviations; 0 turns the check off."""

    spike_window: int = Field(default=64, ge=8)
    """Number of steps in the running median."""

    spike_rollbacks: NonNegativeInt = 0
    """Maximum number of rollbacks. A rollback returns to a state before the spike and skips the batches since then; 0
    only reports spikes."""

    spike_margin: NonNegativeInt = 0
    """Minimum number of steps between the state to roll back to and the spike."""

    stragglers_every: NonNegativeInt = 0
    """Steps between reports of the rank that computes longest; 0 makes none."""

    reexecute_every: NonNegativeInt = 0
    """Steps between steps that are computed twice to detect devices that compute wrong results; 0 repeats none."""

    reexecute_on: Literal["same", "replica"] = "same"
    """Rank of the second computation: the same, or the next replica, which also detects a rank that is always wrong."""


class TestingConfig(Section):
    """Injected faults: slow ranks, dead ranks and slow networks."""

    straggler: str = ""
    """Slow ranks, as comma-separated RANK=FACTOR: with 1=4, the forward and backward passes of rank 1 take 4 times as
    long (it sleeps). Each rank's computing and waiting time is shown at the end."""

    min_step_seconds: float = Field(default=0.0, ge=0, le=3600)
    """Minimum compute time per step in seconds (sleeps if faster). With more ranks than cores, ranks then behave as if
    each had its own machine."""

    kill: str = ""
    """Ranks that kill themselves (SIGKILL), as comma-separated RANK@STEP: shows which parallel.sync continues."""

    link_gbs: NonNegativeFloat = 0.0
    """Simulated network: maximum rate in GB/s at which a rank's data leaves it in a collective, by waiting (not for
    pipelines, nor for a parallel.sync that shares memory). 0 simulates none."""
