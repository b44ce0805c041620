"""A step of training, priced before it is run: time by what takes it, memory of every pipeline rank by what holds it.

Physics with few constants, which were fitted to published measurements (`shoal.cost.own`, docs/validate.md): a layer
takes the time of its products by their shape, of its bytes, and of the host that launches it; a collective its closed
form on what a cluster's links attain; the pipeline is the schedule's own program, played. What the engine overlaps is
taken off: gradients that are reduced while backward goes on, parameters that are gathered a unit ahead, the sum over
tensor-parallel ranks of an input's gradient while that of the weight is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import exp, log2

import numpy as np

from shoal.catalog import ModelShape
from shoal.catalog.calibration import calibration
from shoal.catalog.clusters import Cluster
from shoal.catalog.software import software_table
from shoal.cost import activations
from shoal.cost.activations import Pass
from shoal.cost.communication import Ring, group_of, ring_of
from shoal.cost.context import layer_bytes
from shoal.cost.experts import routed_rows
from shoal.cost.flops import hardware_flops, model_flops
from shoal.cost.own import Layer, attained, layer_of, memory_rate, spread
from shoal.cost.state import StagePart, StateBytes, bucket_bytes, state_bytes
from shoal.errors import UsageError
from shoal.layout import Layout
from shoal.pipeline.choose import program_of
from shoal.pipeline.program import Program
from shoal.plan.parts import stage_parts
from shoal.precision.formats import FORMATS, Formats
from shoal.simulate import Links, Timeline, Times, simulate
from shoal.simulate.columns import Columns

ATTENTION_BACKWARD = 2.5  # a fused kernel's backward has 5 products for 2 of its forward (Dao 2023, section 3)
NO_STATES = {
    "pp", "schedule", "virtual_stages", "stage_layers", "sequence_slices", "micro_batch", "recompute", "overlap",
}  # fmt: skip
"""Fields of a layout that change nothing in what a stage holds between steps."""
KINDS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp32"}  # of the accelerators' peaks


@dataclass(frozen=True)
class Run:
    """What is estimated."""

    shape: ModelShape
    layout: Layout
    cluster: Cluster
    sequence_length: int
    global_batch: int
    precision: str = "bf16"
    optimizer: str = "adamw"

    @property
    def policy(self) -> Formats:
        """The number formats."""
        return FORMATS[self.precision]

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.global_batch * self.sequence_length

    @property
    def microbatches(self) -> int:
        """Of each replica."""
        return self.layout.microbatches(self.global_batch)


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one micro-batch on one stage.

    Attributes:
        matrices, attention, elements: of its forward.
        tensor: of its forward's tensor-parallel collectives.
        recompute: of what backward computes again, collectives included.
        tensor_backward: of backward's collectives, those that wait.
        context: of its forward's ring and exchange of heads, what attention's products do not hide.
        context_backward: of backward's.
        experts: of the exchanges of rows, in each direction.
        gather_forward, gather_backward: ZeRO: what is left of gathers and reductions behind computation.
        launches, launches_backward: what the host adds, where it is slower than the accelerator.
    """

    matrices: float
    attention: float
    elements: float
    tensor: float
    recompute: float
    tensor_backward: float
    context: float
    context_backward: float
    experts: float
    gather_forward: float
    gather_backward: float
    launches: float
    launches_backward: float

    @property
    def forward(self) -> float:
        """All of a forward."""
        computing = self.matrices + self.attention + self.elements + self.launches
        return computing + self.tensor + self.context + self.experts + self.gather_forward

    @property
    def backward_weight(self) -> float:
        """The half that makes the gradients of the weights: one product for each of the forward's."""
        return self.matrices

    @property
    def backward_input(self) -> float:
        """The other half."""
        computing = self.matrices + ATTENTION_BACKWARD * self.attention + 2 * self.elements + self.launches_backward
        waiting = self.tensor_backward + self.context_backward + self.experts + self.gather_backward
        return computing + self.recompute + waiting


@dataclass(frozen=True)
class Memory:
    """Bytes on a rank at the worst time of a step, by what holds them."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    gathered: float
    buffers: float
    stashed: float
    reserve: float

    @property
    def allocated(self) -> float:
        """By tensors: `torch.cuda.max_memory_allocated`."""
        return self.reserved - self.reserve

    @property
    def reserved(self) -> float:
        """From the device, with what the allocator and libraries keep."""
        return sum(vars(self).values())


class Estimate:
    """A run's step, priced.

    Args:
        run: whose layout and schedule have been checked, and fill the cluster.
        program: of the layout, where it is there already, or its columns, in which gathers of parameters that need
            none may stand. An outline, without actions, is enough for `stage_of`, `finish_of` and `memory_of`.
        known: states that were counted and layers that were priced, by what decides them; estimates of one model
            may share it.

    Raises:
        UsageError: only some tokens pass through layers of the model.
    """

    def __init__(self, run: Run, program: Program | Columns | None = None, known: dict | None = None):
        if run.shape.depths is not None:
            raise UsageError(
                "model.depths: the time and memory of layers that only some tokens pass through are not estimated."
                "\n  Leave model.depths out for those of the whole model, or measure."
            )
        self.run = run
        layout = run.layout
        self.played = program or program_of(layout, run.microbatches)
        self.program = self.played.program if isinstance(self.played, Columns) else self.played
        self.parts = stage_parts(run.shape, self.program)
        self.known = {} if known is None else known
        self.priced: dict[tuple, StageTimes] = {}
        self.kept: dict[tuple, int] = {}
        self.counts = tuple(value for name, value in layout if name not in NO_STATES)
        self.peak = run.cluster.accelerator.dense_flops(KINDS[run.policy.compute.name])
        self.hbm = memory_rate(run.cluster)
        self.cluster = attained(run.cluster)
        self.slower = 1 + float(calibration()["stragglers"]) * log2(run.cluster.nodes)
        self.groups = {
            axis: group_of(layout, axis, self.cluster)
            for axis in ("tp", "shard", "replicate", "ep", "etp", "edp_shard", "edp_replicate")
        }
        self.ring = ring_of(self.cluster, layout.ring, layout.tp * layout.ulysses)
        self.exchange = ring_of(self.cluster, layout.ulysses, layout.tp)
        self.forward = Pass(run.shape, layout, run.sequence_length, run.policy.compute.itemsize)

    # ---- time ----------------------------------------------------------------------------------------------------

    def state_of(self, parts: Sequence[StagePart]) -> StateBytes:
        """Of some stages together, counted once for those that are alike."""
        key = (
            self.counts,
            *((len(part.layers), self.sparse(part), part.first, part.last, part.shared) for part in parts),
        )
        if key not in self.known:
            run = self.run
            self.known[key] = state_bytes(run.shape, run.layout, run.policy, run.optimizer, parts)
        return self.known[key]

    @cached_property
    def stages(self) -> list[StageTimes]:
        """The times of every stage."""
        return [self.stage_of(part) for part in self.parts]

    def stage_of(self, part: StagePart) -> StageTimes:
        """Of one stage, priced once for those that are alike."""
        key = (len(part.layers), self.sparse(part), part.first, part.last)
        if key not in self.priced:
            self.priced[key] = self._stage(part)
        return self.priced[key]

    def sparse(self, part: StagePart) -> int:
        """Layers of a stage that have experts."""
        return 0 if self.run.shape.experts is None else sum(self.run.shape.sparse(layer) for layer in part.layers)

    def layer(self, *, sparse: bool = False) -> Layer:
        """The times of one layer of one micro-batch.

        Args:
            sparse: with experts, as a dense one that is as wide as what a token meets: as if a rank's experts were one
                product, which they nearly are where each has many rows.
        """
        run, layout = self.run, self.run.layout
        shape = run.shape
        if sparse:
            experts = shape.experts
            shape = shape.model_copy(update={"ffn": (experts.per_token + experts.shared) * experts.ffn})
        later = 2 - 1 / layout.ring if layout.cp_order == "contiguous" else 1.0
        split = layout.micro_batch, layout.tp, layout.cp, layout.sequence_parallel, layout.recompute, later
        key = ("layer", sparse, run.cluster.name, run.precision, run.sequence_length, *split)
        if key not in self.known:
            itemsize = run.policy.compute.itemsize
            self.known[key] = layer_of(
                shape, run.cluster, KINDS[run.policy.compute.name], itemsize, run.sequence_length, *split
            )
        return self.known[key]

    def _exchange(self) -> float:
        """Seconds of one direction of a layer with experts that its rows travel, of which every expert gets as many."""
        run, layout = self.run, self.run.layout
        rows = routed_rows(run.shape, layout, run.sequence_length)
        row = run.shape.hidden * run.policy.compute.itemsize
        sent = 2 * self.groups["ep"].all_to_all(rows.away * row) if layout.ep > 1 else 0.0
        if layout.expert_tensor > 1:
            sent += 2 * self.groups["etp"].all_gather(rows.here * row)  # and the reduce-scatter, which sends as much
        return sent

    def _spread(self, state: StateBytes) -> list[tuple[int, Ring, Ring]]:
        """Parameters of a rank, the ranks that they are sharded over, and those that replicate the shards: experts have
        their own."""
        found = [(state.elements - state.experts, self.groups["shard"], self.groups["replicate"])]
        if state.experts:
            found.append((state.experts, self.groups["edp_shard"], self.groups["edp_replicate"]))
        return found

    def _stage(self, part: StagePart) -> StageTimes:
        run, layout, layers = self.run, self.run.layout, len(part.layers)
        share = self.sparse(part) / max(1, layers)
        kinds = [(1 - share, self.layer()), *([(share, self.layer(sparse=True))] if share else [])]
        layer = Layer(*(sum(part * value[i] for part, value in kinds) for i in range(len(Layer._fields))))
        rows = share * self._exchange() if share else 0.0
        head, loss = (layer.head, layer.loss) if part.last else (0.0, 0.0)
        context, context_backward = self._context(layer.attention)
        ends = (part.first + part.last) * layer.exchange / 2
        one = layer.products + layer.attention + layer.elements
        again = {
            "none": 0.0, "selective": layer.attention + context, "full": one + 2 * layer.exchange + context + rows,
        }[layout.recompute]
        compute = layers * one + head + loss / 3
        gather = reduce = 0.0
        for elements, shard, _ in self._spread(self.state_of([part])) if layout.zero >= 2 else ():
            if shard.ranks > 1:
                reduce += shard.reduce_scatter(elements * run.policy.reduce.itemsize)
                gather += shard.all_gather(elements * run.policy.compute.itemsize) if layout.zero == 3 else 0.0
        gather_again = gather if layout.reshard_after_forward else 0.0
        overlapped = reduce if layout.overlap else 0.0
        contention = float(calibration()["contention"])  # what travels behind computation slows it down
        backward = max(0.0, gather_again + overlapped - 2 * compute) + contention * (gather_again + overlapped)
        found = StageTimes(
            matrices=layers * layer.products + head,
            attention=layers * layer.attention,
            elements=layers * layer.elements + loss / 3,
            tensor=layers * 2 * layer.exchange + ends,
            recompute=layers * again,
            tensor_backward=layers * layer.exposed + ends,
            context=layers * context,
            context_backward=layers * context_backward,
            experts=layers * rows,
            gather_forward=max(0.0, gather - compute) + contention * gather,
            gather_backward=backward + reduce - overlapped,
            launches=layers * layer.launches + float(calibration()["micro_batch"]),
            launches_backward=layers * layer.launches_backward,
        )
        return StageTimes(**{name: self.slower * seconds for name, seconds in vars(found).items()})

    def _context(self, core: float) -> tuple[float, float]:
        """Seconds of a layer's forward and backward that ranks wait for others' keys and values.

        A block travels while the one before is computed with; the gradients of the last one travel alone.
        """
        run, layout = self.run, self.run.layout
        if layout.cp == 1:
            return 0.0, 0.0
        sent = layer_bytes(run.shape, layout, run.sequence_length, run.policy.compute.itemsize)
        exchange = self.exchange.all_to_all(sent.exchange) if layout.ulysses > 1 else 0.0
        if layout.ring == 1:
            return exchange, exchange
        each, steps = core / layout.ring, layout.ring - 1
        forward = max(0.0, self.ring.send(sent.block) - each)
        backward = max(0.0, self.ring.send(sent.block + sent.gradient) - ATTENTION_BACKWARD * each)
        return exchange + steps * forward, exchange + steps * backward + self.ring.send(sent.gradient)

    def finish_of(self, part: StagePart) -> tuple[float, float, float]:
        """Seconds after a stage's last backward: what is left of its reduction, its update, its gather."""
        run, layout, state = self.run, self.run.layout, self.state_of([part])
        policy, together = run.policy, layout.sync == "all-reduce"
        reduction = updated = gather = 0.0
        for elements, shard, replicate in self._spread(state):
            size, shards = elements * policy.reduce.itemsize, shard.ranks if together else 1
            updated += elements / shards
            if shards > 1 and layout.zero == 1:
                reduction += shard.reduce_scatter(size)
            if together and replicate.ranks > 1:
                reduction += replicate.all_reduce(size / shards)
            if shards > 1 and layout.zero in (1, 2):
                gather += shard.all_gather(elements * policy.compute.itemsize)
        if reduction:
            # Overlapped with the last micro-batch's backward, but for the last bucket of it.
            size = state.elements * policy.reduce.itemsize
            bucket = min(1.0, bucket_bytes(layout) / max(1, size)) if layout.overlap else 1.0
            stage = self.stage_of(part)
            backward = stage.backward_input + stage.backward_weight
            reduction = max(reduction * bucket, reduction - float(calibration()["hide_data"]) * backward)
        touched = 2 * state.optimizer + updated * (2 * policy.storage.itemsize + 2 * policy.reduce.itemsize)
        return reduction, touched / self.hbm, gather

    @cached_property
    def finishing(self) -> np.ndarray:
        """[stages, 3] seconds: reduction, optimizer, gather."""
        return np.array([self.finish_of(part) for part in self.parts])

    @cached_property
    def link(self) -> Links:
        """From a pipeline rank to the next."""
        run, pipeline = self.run, group_of(self.run.layout, "pp", self.cluster)
        moved = run.policy.compute.itemsize * self.forward.tokens_here * run.shape.hidden
        return Links.of_bandwidth(moved, pipeline.bandwidth, max(pipeline.latency, pipeline.outer_latency))

    @cached_property
    def hop(self) -> float:
        """Seconds of a message between two pipeline ranks, from its sending to its arrival."""
        return float(self.link.time + self.link.latency)

    @cached_property
    def timeline(self) -> Timeline:
        """The program, played."""
        step_of_rank = [self.finishing[self.program.stages_of(r), 1].sum() for r in range(self.program.ranks)]
        times = Times(
            forward=np.array([s.forward for s in self.stages]),
            backward_input=np.array([s.backward_input for s in self.stages]),
            backward_weight=np.array([s.backward_weight for s in self.stages]),
            reduce=self.finishing[:, 0],
            step=max(step_of_rank),
            gather=self.finishing[:, 2],
        )
        return simulate(self.played, times, self.link)

    @cached_property
    def step_seconds(self) -> float:
        """Of one step."""
        return self.timeline.step_time

    @property
    def interval(self) -> tuple[float, float]:
        """Between what the time of a step is in four of five cases: as far as estimates of other software were off."""
        factor = exp(spread(self.run.cluster))
        return self.step_seconds / factor, self.step_seconds * factor

    @cached_property
    def breakdown(self) -> dict[str, float]:
        """Seconds of a step on the busiest pipeline rank, by what takes them; they add up to the step."""
        busiest = int(self.timeline.busy[0].argmax())
        stages = self.program.stages_of(busiest)
        of: dict[str, float] = dict.fromkeys(NAMES, 0.0)
        for stage in stages:
            times, count = self.stages[stage], len(self.program.microbatches_of(stage))
            of["matrix products"] += count * 3 * times.matrices
            of["attention"] += count * (1 + ATTENTION_BACKWARD) * times.attention
            of["element by element"] += count * 3 * times.elements
            of["recomputation"] += count * times.recompute
            of["tensor parallelism"] += count * (times.tensor + times.tensor_backward)
            of["expert parallelism"] += count * 2 * times.experts
            of["context parallelism"] += count * (times.context + times.context_backward)
            of["launches"] += count * (times.launches + times.launches_backward)
            of["gathers and reductions"] += count * (times.gather_forward + times.gather_backward)
            of["gathers and reductions"] += self.finishing[stage, 0] + self.finishing[stage, 2]
            of["optimizer"] += self.finishing[stage, 1]
        of["bubble"] = max(0.0, self.step_seconds - sum(of.values()))
        return {name: float(seconds) for name, seconds in of.items()}

    @cached_property
    def mfu(self) -> float:
        """Model FLOPs over the dense peak of all accelerators and the step's time."""
        done = model_flops(self.run.shape, self.run.sequence_length, self.run.tokens)
        return done / (self.step_seconds * self.peak * self.run.layout.world_size)

    @cached_property
    def hfu(self) -> float:
        """The same of hardware FLOPs."""
        layout = self.run.layout
        done = hardware_flops(self.run.shape, self.run.sequence_length, layout.recompute, self.run.tokens)
        return done / (self.step_seconds * self.peak * layout.world_size)

    # ---- memory --------------------------------------------------------------------------------------------------

    @cached_property
    def memory(self) -> list[Memory]:
        """Of every pipeline rank; of its tensor-parallel and data-parallel ranks the first."""
        kept = np.array([self.kept_of(part) for part in self.parts])
        peaks, versions = self.timeline.peak_bytes(kept.astype(float)), self.timeline.weight_versions
        return [
            self.memory_of([self.parts[s] for s in self.program.stages_of(rank)], float(alive), int(copies))
            for rank, (alive, copies) in enumerate(zip(peaks, versions, strict=True))
        ]

    def kept_of(self, part: StagePart) -> int:
        """Bytes that one micro-batch keeps alive on a stage, counted once for those that are alike."""
        sparse = self.sparse(part)
        key = (len(part.layers), sparse, part.first, part.last)
        if key not in self.kept:
            saved = activations.stage(self.forward, len(part.layers), first=part.first, last=part.last, sparse=sparse)
            self.kept[key] = activations.total(saved)
        return self.kept[key]

    def memory_of(self, parts: Sequence[StagePart], alive: float, versions: int = 1) -> Memory:
        """Of a rank that holds some stages, ``alive`` bytes of activations at its worst time, and some versions."""
        run, state = self.run, self.state_of(parts)
        last = any(part.last for part in parts)
        work = max(activations.recomputed(self.forward), activations.loss_workspace(self.forward) if last else 0)
        held = (
            state.parameters, state.gradients, state.optimizer, alive, state.gathered, state.whole_gradients + work,
            (versions - 1) * state.elements * run.policy.compute.itemsize,
        )
        c, gpu = calibration(), bool(run.cluster.accelerator.devices)
        unused = float(c["fragmentation"][list(software_table()).index("shoal")]) * (alive + work)
        return Memory(*held, unused + (1e9 * float(c["base"] + c["context"]) if gpu else 0.0))

    @property
    def fullest(self) -> Memory:
        """Of the pipeline rank that needs most."""
        return max(self.memory, key=lambda memory: memory.reserved)

    @property
    def fits(self) -> bool:
        """Whether every rank's memory is enough."""
        return self.fullest.reserved <= self.capacity

    @property
    def capacity(self) -> float:
        """Bytes of each accelerator that a process can have: what is sold as 80 GB has 80 GiB."""
        machine = self.run.cluster.accelerator
        return machine.memory_bytes * (float(calibration()["usable"]) if machine.devices else 1.0)


NAMES = (
    "matrix products", "attention", "element by element", "recomputation", "tensor parallelism",
    "context parallelism", "expert parallelism", "gathers and reductions", "optimizer", "launches", "bubble",
)  # fmt: skip
