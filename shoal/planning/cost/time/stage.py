"""Times of a pipeline stage per micro-batch; `shoal.planning.cost.memory.stage` has its memory.

The model is physical with few constants, fitted to published measurements (`shoal.planning.cost.time.engine_layer`,
docs/validate.md). A layer takes the time of its products by shape, of its bytes, and of the host that launches it; a
collective takes its closed form on attained link rates. The engine's overlap is subtracted: gradient reduction during
the backward, parameter gathers one unit ahead, and the tensor-parallel sum of an input gradient during the weight
gradient. Sophia's Hessian estimates are passes like the step's own, a fraction of one in each step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from math import log2
from typing import NamedTuple, TypeVar

import numpy as np

from shoal.engine.optim.orthogonal import AT_ONCE
from shoal.pipeline.simulator.times import MessageTimes
from shoal.planning.cost.memory.stage import Kinds, StageMemory
from shoal.planning.cost.memory.state import StateBytes
from shoal.planning.cost.parameters import StagePart
from shoal.planning.cost.time.communication import CommunicationGroup, axis_extent, ring_group
from shoal.planning.cost.time.engine_layer import LayerTimes, attained, layer_times, memory_rate
from shoal.planning.cost.time.traffic import context_parallel, entries_again, even_share
from shoal.planning.run import EstimatedRun
from shoal.spec.layout import Layout
from shoal.spec.number_formats import FP32

V = TypeVar("V", float, np.ndarray)
ROUTING = 7  # reads or writes of a hidden state in a forward that moves few rows: scores (a copy), a sum
ATTENTION_BACKWARD = 2.5  # a fused backward has 5 products per 2 in its forward (Dao 2023, section 3)


class StageTimes(NamedTuple):
    """Seconds of one micro-batch on one stage."""

    # matrices, attention, elements: parts of its forward
    matrices: float
    attention: float
    elements: float
    adding: float  # adding gradients to their sums over micro-batches
    tensor: float  # tensor-parallel collectives of its forward
    recompute: float  # recomputation in the backward, collectives included
    tensor_backward: float  # exposed tensor-parallel collectives of the backward, without the following
    tensor_weight: float  # exposed gathers of blocks' inputs, for weight gradients
    context: float  # ring and head exchange of its forward that attention's products do not hide
    context_backward: float  # the same for the backward
    experts: float  # exchanges of rows (of experts, or of tokens in mixture-of-depths layers), per direction
    # of these, and of recomputed ones, what a paired micro-batch can hide (`Layout.ep_overlap`)
    hidden: float
    hidden_backward: float
    # gather_forward, gather_backward: ZeRO gathers and reductions that computation does not hide
    gather_forward: float
    gather_backward: float
    # launches, launches_backward: host time of a forward and a backward, if the host itself computes
    launches: float
    launches_backward: float
    launched: float  # host time of both, if it launches ahead of an accelerator; gathers included

    @property
    def passes(self) -> tuple[float, float, float]:
        """Seconds of a forward and of both halves of a backward."""
        return self.forward, self.backward_input, self.backward_weight

    @property
    def forward(self) -> float:
        computing = self.matrices + self.attention + self.elements + self.launches
        return computing + self.tensor + self.context + self.experts + self.gather_forward

    @property
    def backward_weight(self) -> float:
        """Seconds of the weight-gradient half: one product for each of the forward's."""
        return self.matrices + self.adding + self.tensor_weight

    @property
    def backward_input(self) -> float:
        computing = self.matrices + ATTENTION_BACKWARD * self.attention + 2 * self.elements + self.launches_backward
        waiting = self.tensor_backward + self.context_backward + self.experts + self.gather_backward
        return computing + self.recompute + waiting


def exposed_sharding(forward: V, backward: V, compute: V, constants: Mapping[str, float]) -> tuple[V, V]:
    """Return the exposed seconds of ZeRO's gathers and reductions in a forward and in a backward.

    Includes the slowdown of the computation that hides the rest.

    Args:
        forward, backward: seconds of these collectives.
        compute: seconds of a forward's computation; a backward's is twice that.
    """
    slowed = constants["contention"]
    return (
        np.maximum(0.0, forward - compute) + slowed * np.minimum(forward, compute),
        np.maximum(0.0, backward - 2 * compute) + slowed * np.minimum(backward, 2 * compute),
    )


def exposed_reduction(
    reduction: V, size: V | float, backward: V | float, layout: Layout, constants: Mapping[str, float]
) -> V:
    """Return the seconds of the reduction of ``size`` bytes of gradients that the last backward does not hide.

    The reduction of the last bucket is always exposed.
    """
    bucket = np.minimum(1.0, layout.bucket_bytes / np.maximum(1, size)) if layout.overlap else 1.0
    return np.maximum(reduction * bucket, reduction - constants["hide_data"] * backward)


def paired_passes(times: np.ndarray, hidden: np.ndarray, holder: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the seconds of each stage's forward with the backward of its rank's other stage. [stages]

    Each of the two computes while the rows of the other travel (DeepSeek-AI 2024, section 3.2.1).

    Args:
        times: [3, stages] seconds of a forward and of both halves of a backward, exchanges of rows included.
        hidden: [2, stages] of these, what the other can hide of a forward and of a backward.
        holder: [stages] the rank of each; every rank has two.
    """
    of_rank = np.argsort(holder, kind="stable").reshape(-1, 2)
    other = np.empty(of_rank.size, int)
    other[of_rank] = of_rank[:, ::-1]
    both, travel = times[0] + (times[1] + times[2])[other], hidden[0] + hidden[1][other]
    return np.maximum(both - travel, travel)


class StagePrices(StageMemory):
    """Prices of the single stages of a run, for any order of micro-batches.

    Args:
        run, known: see `StageMemory`; also caches priced layers and groups of ranks.
    """

    def __init__(self, run: EstimatedRun, known: dict | None = None):
        super().__init__(run, known)
        self.finished: dict[tuple, tuple[float, float, float]] = {}
        self.peak, self.hbm, self.cluster, self.slower = self.once("machine", lambda: (
            run.cluster.accelerator.dense_flops(run.products), memory_rate(run.cluster, run.software.name),
            attained(run.cluster), 1 + self.constants["stragglers"] * log2(run.cluster.nodes),
        ))  # fmt: skip

    @property
    def hides_rows(self) -> bool:
        """Whether paired micro-batches can hide each other's exchanges of rows, if the schedule pairs them."""
        return self.run.layout.ep > 1 and self.run.cluster.at_once is None  # transfers run in the background

    def group(self, axis: str) -> CommunicationGroup:
        """Return the ranks along an axis, with attained rates of the cluster."""
        return self._ring(*axis_extent(self.run.layout, axis))

    def _ring(self, ranks: int, stride: int) -> CommunicationGroup:
        key = ("ring", ranks, stride)
        return self.once(key, lambda: ring_group(self.cluster, ranks, stride))

    def stage_times(self, part: StagePart) -> StageTimes:
        """Return the times of one stage, cached for equal stages."""
        same, layout = (self.kinds(part), part.first, part.last), self.run.layout
        sharded = self.state_key if layout.zero >= 2 else ()  # all others with the same passes take equally long
        ways = (self.group("shard"), self.group("edp_shard"), layout.overlap) if sharded else ()
        return self.once(
            ("stage", self.pass_key, layout.cp_order, sharded, ways, *same), lambda: self._stage(*same, part)
        )

    @property
    def linear(self) -> np.ndarray:
        """[6, 5] Seconds of a forward, of both halves of a backward, of their launches, and of what a paired
        micro-batch can hide of a forward and of a backward, as a linear model.

        The columns are: a dense layer, an expert layer, being the first stage, being the last, and any stage. They add
        up to every stage, without the additions of ZeRO-2 and 3.
        """
        key = ("linear", self.pass_key, self.run.layout.cp_order)
        if key not in self.known:
            layers = [(((sparse, False), 1),) for sparse in ((False, True) if self.run.shape.experts else (False,))]
            counts = [((), False, False), ((), True, False), ((), False, True), *((of, False, False) for of in layers)]
            found = [self._stage(*of) for of in counts]
            any_stage, *others = np.array([(*s.passes, s.launched, s.hidden, s.hidden_backward) for s in found])
            first, last, dense, *sparse = (other - any_stage for other in others)
            self.known[key] = np.stack([dense, *(sparse or [dense]), first, last, any_stage], axis=1)
        return self.known[key]

    def layer(self, *, sparse: bool = False, skips: bool = False) -> LayerTimes:
        """Return the times of one layer of one micro-batch.

        Args:
            sparse: a layer with experts, priced as a dense layer with the width of a token's experts: the products of a
                rank's experts are nearly as fast as one product if each has many rows.
            skips: a mixture-of-depths layer: the tokens that pass through it, and their selection, with `ROUTING`
                passes over the hidden state.
        """
        run, layout = self.run, self.run.layout
        shape = run.shape
        s = (self.forward.chosen if skips else self.forward).s
        if sparse:
            experts = shape.moe
            shape = shape.model_copy(update={"ffn": (experts.per_token + experts.shared) * experts.ffn})
        key = (
            "layer", sparse, skips, layout.micro_batch, layout.tp, layout.tp_x, layout.cp, layout.sequence_parallel,
            layout.recompute, layout.cp_order == "contiguous" and layout.cp_ring,
        )  # fmt: skip
        if key not in self.known:
            number = next((i for i in range(run.shape.layers) if run.shape.sparse(i) == sparse), 0)
            one = StagePart(range(number, number + 1), first=False, last=False)
            found = layer_times(run, shape, s, entries_again(self.forward, one))
            if sparse:  # rows are sorted by expert and back, weighted and summed
                rows = (self.forward.chosen if skips else self.forward).routed.sent
                moved = self.constants["passes_rows"] * rows * shape.hidden * self.forward.itemsize
                found = found._replace(elements=found.elements + moved / self.hbm)
            if skips:
                moved = ROUTING * self.forward.tokens_between * shape.hidden * self.forward.itemsize
                found = found._replace(elements=found.elements + moved / self.hbm)
            self.known[key] = found
        return self.known[key]

    def _exchange(self) -> tuple[float, float]:
        """Return the seconds of row exchanges of an expert layer in one direction, with balanced experts: with the
        ranks that have other experts, and with those that have other parts of the same."""
        layout, rows = self.run.layout, self.forward.routed
        row = self.run.shape.hidden * self.forward.itemsize
        sent = 2 * self.group("ep").all_to_all(rows.away * row) if layout.ep > 1 else 0.0
        # The gather, and the reduce-scatter of the same size.
        return sent, 2 * self.group("etp").all_gather(rows.computed * row) if layout.expert_tensor > 1 else 0.0

    def _travel(self) -> float:
        """Return the seconds of token moves of a mixture-of-depths layer in one direction, to and from their ranks."""
        group = self.group("sequence" if self.run.layout.sequence_parallel else "cp")
        if group.ranks == 1:
            return 0.0
        rows = self.forward.chosen.tokens_between * (group.ranks - 1) / group.ranks
        return 2 * group.all_to_all(rows * self.run.shape.hidden * self.forward.itemsize)

    def _spread(self, part: StagePart) -> list[tuple[int, int, CommunicationGroup, CommunicationGroup]]:
        """Return a stage's groups of dense and expert parameters: (elements, messages, sharding, replicating ranks)."""
        state, (buckets, of_experts) = self.stage_state([part]), self.message_counts(part, self.run.layout.zero)
        found = [(state.elements - state.experts, buckets, self.group("shard"), self.group("replicate"))]
        if state.experts:
            found.append((state.experts, of_experts, self.group("edp_shard"), self.group("edp_replicate")))
        return found

    def sharding(self, part: StagePart) -> tuple[float, float]:
        """Return the seconds of a micro-batch's parameter gathers (ZeRO-3) and gradient reductions (ZeRO-2 and 3).

        Each unit is gathered with one message when it is reached.
        """
        policy, gather, reduce = self.run.policy, 0.0, 0.0
        for elements, messages, shard, _ in self._spread(part) if self.run.layout.zero >= 2 else ():
            if shard.ranks > 1:
                reduce += shard.reduce_scatter(elements * policy.reduce.itemsize, messages)
                gather += shard.all_gather(elements * policy.compute.itemsize, messages)
        return gather if self.run.layout.zero == 3 else 0.0, reduce

    def _stage(self, kinds: Kinds, first: bool, last: bool, part: StagePart | None = None) -> StageTimes:
        """Return the times of a stage of some layers; without ZeRO's additions if ``part`` is None."""
        layout, shape = self.run.layout, self.run.shape
        modules = range(shape.layers, shape.blocks) if last else ()  # of multi-token prediction
        kinds = (*kinds, *(((shape.sparse(i), False), 1) for i in modules))
        layers, dense = sum(count for _, count in kinds), self.layer()
        rows = hidden = context = context_backward = 0.0
        parts = []  # means over layers
        for (sparse, skips), count in kinds if layers else (((False, False), 1),):
            share, one = count / (layers or 1), self.layer(sparse=sparse, skips=skips)
            parts.append([share * seconds for seconds in one])
            sent, gathered = self._exchange() if sparse else (0.0, 0.0)
            rows += share * (sent + gathered + (self._travel() if skips else 0.0))
            hidden += share * sent * self.hides_rows * self.run.software.overlap_experts
            waits = self._context(one.attention, skips=skips)
            context, context_backward = context + share * waits[0], context_backward + share * waits[1]
        layer = LayerTimes(*map(sum, zip(*parts, strict=True)))._replace(head=dense.head, loss=dense.loss)
        head, loss = (layer.head, layer.loss * (1 + len(modules))) if last else (0.0, 0.0)
        of_module = 1 + 2 * shape.hidden * layout.tp / (shape.vocab * layout.sequence_shards)  # with its projection
        head *= 1 + len(modules) * of_module
        ends = (first + last) * layer.exchange / 2
        forward = layer.products + layer.attention + layer.elements
        again = {
            "none": 0.0, "selective": layer.attention + context, "full": forward + 2 * layer.exchange + context + rows,
        }[layout.recompute]
        compute = layers * forward + head + loss / 3
        gather, reduce = self.sharding(part) if part else (0.0, 0.0)
        in_backward = gather * layout.reshard_after_forward + reduce * layout.overlap
        forwards, backwards = exposed_sharding(gather, in_backward, compute, self.constants)
        gathers = forwards, backwards + reduce * (not layout.overlap)
        host = layers * layer.launches + self.constants["micro_batch"], layers * layer.launches_backward
        ahead = self.run.cluster.at_once is None  # otherwise its cores compute
        found = StageTimes(
            matrices=layers * layer.products + head,
            attention=layers * layer.attention,
            elements=layers * layer.elements + loss / 3,
            adding=self._adding(kinds, first, last),
            tensor=layers * 2 * layer.exchange + ends,
            recompute=layers * again,
            tensor_backward=layers * layer.exposed + ends,
            tensor_weight=layers * layer.exposed_gathers,
            context=layers * context,
            context_backward=layers * context_backward,
            experts=layers * rows,
            hidden=layers * hidden,
            hidden_backward=layers * hidden * (1 + (layout.recompute == "full")),
            gather_forward=gathers[0],
            gather_backward=gathers[1],
            launches=0.0 if ahead else host[0],
            launches_backward=0.0 if ahead else host[1],
            launched=sum(host) + sum(gathers) if ahead else 0.0,
        )
        slower = self.slower * self.run.passes
        return StageTimes(*[slower * seconds for seconds in found])

    def _adding(self, kinds: Kinds, first: bool, last: bool) -> float:
        """Return the seconds to read each gradient of a stage, and to read and write its sum over micro-batches.

        Fused products in 16 or 32 bits add to the sum themselves, and memory waits for arithmetic there
        (`shoal.engine.kernels.add_product`). The rows of the embedding and the matrices of experts are added alone.
        """
        shape, layout, policy = self.run.shape, self.run.layout, self.run.policy
        fused, eight = self.run.fuses, self.forward.eight is not None
        ends = first if fused else last + (first and not shape.tied)
        weights = ends * shape.vocab * shape.hidden / layout.tp
        for (sparse, _), count in kinds:
            # `linear` also asks for a dense layer if the model has none; that result is unused.
            layer = next((i for i in range(shape.layers) if shape.sparse(i) == sparse), 0)
            plain, experts = self.stage_elements(StagePart(range(layer, layer + 1), False, False))
            weights += count * (experts + (plain if eight or not fused else 0))
        moved = weights * (policy.compute.itemsize + 2 * policy.reduce.itemsize)
        return self.constants["accumulate"] * moved / self.hbm

    def _context(self, core: float, *, skips: bool) -> tuple[float, float]:
        """Return the seconds of a layer's forward and backward in which ranks wait for other ranks' keys and values.

        A block is transferred during the computation on the previous one; the last block's gradients are exposed.
        """
        run, layout = self.forward.chosen if skips else self.forward, self.run.layout
        if layout.cp == 1:
            return 0.0, 0.0
        exchange = 0.0
        if layout.ulysses > 1:
            sent, _ = context_parallel(run, 1, even_share(run))
            exchange = self._ring(layout.ulysses, layout.tp).all_to_all(sent["ulysses", "all-to-all"])
        if layout.cp_ring == 1:
            return exchange, exchange
        ring = self._ring(layout.cp_ring, layout.tp * layout.ulysses)
        each, steps = core / layout.cp_ring, layout.cp_ring - 1
        block, gradient = run.itemsize * run.ring_elements, run.exact * run.ring_elements
        forward = max(0.0, ring.send(block) - each)
        backward = max(0.0, ring.send(block + gradient) - ATTENTION_BACKWARD * each)
        return exchange + steps * forward, exchange + steps * backward + ring.send(gradient)

    def finish_times(self, part: StagePart) -> tuple[float, float, float]:
        """Return the exposed seconds of a stage's reduction, its update and its gather after its last backward."""
        key = (self.kinds(part), part.first, part.last, part.shared)
        if key in self.finished:
            return self.finished[key]
        run, layout, state = self.run, self.run.layout, self.stage_state([part])
        policy, together = run.policy, layout.sync == "all-reduce"
        reduction = updated = gather = 0.0
        for elements, messages, shard, replicate in self._spread(part):
            size, shards = elements * policy.reduce.itemsize, shard.ranks if together else 1
            updated += elements / shards
            if shards > 1 and layout.zero == 1:
                reduction += shard.reduce_scatter(size, messages)
            if together and replicate.ranks > 1:
                reduction += replicate.all_reduce(size / shards, messages)
            if shards > 1 and layout.zero in (1, 2):
                gather += shard.all_gather(elements * policy.compute.itemsize, messages)
        reduction *= run.passes
        if reduction:
            stage, size = self.stage_times(part), state.elements * policy.reduce.itemsize
            backward = stage.backward_input + stage.backward_weight
            reduction = exposed_reduction(reduction, size, backward, layout, self.constants)
        touched = 2 * state.optimizer + updated * (2 * policy.storage.itemsize + 2 * policy.reduce.itemsize)
        update = self.constants["update_slow"] * touched / self.hbm + self._orthogonal(state)
        if part.last and run.cluster.at_once is None:  # what the host does between steps, while its device waits
            update += self.calibration.at("fixed")
        self.finished[key] = reduction, update, gather
        return self.finished[key]

    def _orthogonal(self, state: StateBytes) -> float:
        """Return the seconds of Muon's products on the busiest rank that holds a matrix, with the exchange."""
        run, machine, found = self.run, self.run.cluster.accelerator, state.orthogonal
        if not found.elements:
            return 0.0
        holders = self.group("stage" if run.shape.experts else "holders")
        wide = "fp32" in machine.peak_flops and not (machine.is_gpu and run.policy.storage == FP32)  # `orthogonal`
        part = self.calibration.at("product", generation=machine.generation)
        rate = machine.dense_flops("fp32" if wide else machine.half) * min(part, machine.matmul_efficiency)
        pieces = -(-found.elements // AT_ONCE)
        size = found.elements * run.policy.storage.itemsize / pieces
        exchange = pieces * (holders.reduce_scatter(size) + holders.all_gather(size)) if holders.ranks > 1 else 0.0
        return found.busiest(holders.ranks, wide=wide) / rate + exchange

    @property
    def hop(self) -> float:
        """Seconds of a message between two pipeline ranks, from sending to arrival."""
        return float(self.link.time + self.link.latency)

    @cached_property
    def link(self) -> MessageTimes:
        """Message times from a pipeline rank to the next."""
        pipeline = self.group("pp")
        return MessageTimes(self.message / pipeline.hop, pipeline.hop_latency + self.constants["hop"])
