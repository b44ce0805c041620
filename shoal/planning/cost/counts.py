"""FLOPs and sent bytes of one rank per step, in closed form; a dry run must count the same.

A stage's passes are closed forms (`shoal.planning.cost.time.work`, `shoal.planning.cost.time.traffic`). The number of
passes, reductions and gathers is read off the program that the runtime executes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from shoal.engine.collectives.position import MeshPosition
from shoal.engine.parallel.context.token_order import TokenAssignment, assign_tokens
from shoal.pipeline.program import BACKWARDS, FORWARDS, SENDS, WEIGHTS, Action, Op, Program, backward_follows
from shoal.planning.cost.buckets import Bucket, Filled, fill_buckets
from shoal.planning.cost.memory.optimizer_state import in_order
from shoal.planning.cost.micro_batch import MicroBatch
from shoal.planning.cost.parameters import LocalParameter, StagePart, stage_parts
from shoal.planning.cost.time.traffic import (
    Sent,
    Share,
    all_reduced,
    context_parallel,
    depths,
    evenly_taken,
    expert_parallel,
    tensor_parallel,
)
from shoal.planning.cost.time.work import Seen, seen_alone, stage_flops
from shoal.spec.layout import Layout
from shoal.spec.number_formats import Formats

ROUTED = 3  # values that a router counts besides the tokens of each expert (`shoal.engine.models.experts.router`)
PREDICTED = 4  # values counted by a mixture-of-depths router, incl. predictor loss
NUMBER = 8  # bytes of each value that the step itself sums: losses, norms, token counts


class RankCounts:
    """FLOPs and sent bytes of the rank at a mesh position.

    Args:
        run: one micro-batch, with the attention kernel in use.
        slices: slices into which the layout's program cuts sequences.
        by_parts: tensor-parallel collectives are overlapped with the products.
    """

    def __init__(
        self, run: MicroBatch, program: Program, mesh: MeshPosition, policy: Formats, slices: Sequence[int] = (), *,
        by_parts: bool = False,
    ):
        self.run, self.program, self.mesh, self.policy, self.by_parts = run, program, mesh, policy, by_parts
        self.slices = slices
        self.spread = assign_tokens(run.layout, run.s, slices)
        some = run.shape.depths  # only these tokens pass through some layers
        self.chosen = None if some is None else assign_tokens(run.layout, some.taken(run.s))
        self.parts = stage_parts(run.shape, program)
        self.held = program.rank_stages(mesh.index("pp"))
        self.actions = program.actions[mesh.index("pp")]

    # ---- FLOPs ---------------------------------------------------------------------------------------------------

    def flops(self) -> int:
        """FLOPs of matrix products and attention, with equally many tokens for each expert."""
        counts = [len(self.program.stage_microbatches(stage)) for stage in self.held]
        chosen = self._seen(self.chosen) if self.chosen is not None and self.run.layout.cp > 1 else None
        seen, window = self._seen(self.spread), self.run.shape.window
        local = self._seen(self.spread, window) if window else None
        each = [stage_flops(self.run, self.parts[stage], seen, chosen, local) for stage in self.held]
        return sum(count * flops for count, flops in zip(counts, each, strict=True))

    def _seen(self, spread: TokenAssignment, window: int | None = None) -> Seen:
        """Return what this rank's attention computes for this token assignment, in layers with this window.

        Assumes that no document ends inside a sequence if ranks share sequences.
        """
        if self.run.layout.cp == 1:
            return seen_alone(self.run, self.slices, window)
        from shoal.engine.models.attention import cut_chunks  # imports torch
        from shoal.engine.parallel.context.causal_blocks import CausalBlocks

        place, ring, u = self.mesh.index("ring"), spread.ring, self.run.layout.ulysses
        scores = []
        documents = cut_chunks(None, window, self.run.s) if window and self.run.shape.chunked else None
        for number in range(len(spread.by_slice)):
            own = spread.ring_chunks(place, range(number, number + 1))
            seen = [spread.ring_chunks(other, range(number + 1)) for other in range(ring)]
            blocks = CausalBlocks(own, seen, documents, by_lengths=self.run.by_lengths, window=window)
            found = [piece for other in range(ring) for piece in blocks.blocks(other)]
            scores.append(tuple(
                (queries, min(keys, piece.window) if piece.window and self.run.by_lengths else keys)
                for piece in found for queries, keys in [piece.sides]
            ))  # a kernel that takes the window counts its keys alone
        return Seen(tuple(spread.lengths(self.mesh.index("cp"))), tuple(scores), u, around=True)

    # ---- bytes sent ----------------------------------------------------------------------------------------------

    def sent(self) -> Sent:
        """Return the bytes sent, by axis and kind of collective.

        Raises:
            ValueError: replicas are not synchronised by sums.
        """
        layout = self.run.layout
        if layout.sync != "all-reduce":
            raise ValueError("no formula exists for the bytes that this run sends")
        sent = Sent()
        for action in self.actions:
            if action.op in FORWARDS or action.op in BACKWARDS:
                sent.add(self._pass(action))
            elif action.op in SENDS:
                tokens = layout.micro_batch * self._share(self.spread, action.part).tokens // layout.sequence_shards
                sent["pp", "send"] += self.run.itemsize * tokens * self.run.hidden_local
        for stage in self.held:
            sent.add(self._data_parallel(stage))
        sent.add(self._once())
        return Sent({key: size for key, size in sent.items() if size})

    def _share(self, spread: TokenAssignment, number: int) -> Share:
        """Return the tokens of a slice (-1: the full sequence) for this token assignment."""
        cp, place = self.mesh.index("cp"), self.mesh.index("ring")
        slices = range(len(spread.by_slice)) if number < 0 else range(number, number + 1)
        until = range(slices.stop)
        lengths = spread.lengths(cp)
        by = [(place - step) % spread.ring for step in range(spread.ring)]
        blocks = tuple(sum(spread.ring_lengths(other, until)) for other in by)
        return Share(
            sum(lengths[i] for i in slices), sum(lengths[i] for i in until),
            sum(spread.ring_lengths(place, slices)), blocks, blocks[0],
        )

    def _pass(self, action: Action) -> Sent:
        part, shape, which = self.parts[action.stage], self.run.shape, 0 if action.op in FORWARDS else 1
        some = [layer for layer in part.layers if shape.skips(layer)]
        every = [layer for layer in part.layers if not shape.skips(layer)]
        every += range(shape.layers, shape.blocks) if part.last else ()
        kinds = [(self.run, part._replace(layers=every), self._share(self.spread, action.part))]
        sent = Sent()
        for _ in range(shape.mtp_depth * part.last):  # the embedding and the head once more
            again = tensor_parallel(self.run, StagePart(()), kinds[0][2].tokens, by_parts=self.by_parts)
            sent.add(again[which])
        if some and self.chosen is not None:
            fewer = replace(self.run, s=self.chosen.tokens)
            kinds.append((fewer, StagePart(some, False, False), self._share(self.chosen, action.part)))
            sent.add(self._moved(len(some), self.chosen)[which])
        for run, layers, share in kinds:
            sent.add(tensor_parallel(run, layers, share.tokens, by_parts=self.by_parts)[which])
            sent.add(context_parallel(run, len(layers.layers), share)[which])
            sent.add(expert_parallel(run, layers, share.tokens)[which])
        return sent

    def _moved(self, layers: int, chosen: TokenAssignment) -> tuple[Sent, Sent]:
        """Return the bytes to move tokens of mixture-of-depths layers, forward and backward.

        Each rank computes an equal share of the chosen tokens and has as many of its own chosen as in a dry run.
        """
        parts = self.run.layout.sequence_shards
        own, ranks = self.mesh.index("cp") * parts + self.mesh.index("tp") % parts, self.run.layout.cp * parts
        if ranks == 1:
            return Sent(), Sent()
        of_token, of_chosen = self._holders(self.spread), self._holders(chosen)
        taken = evenly_taken(chosen.tokens, self.spread.tokens)
        moved = sum((of_token[place] == own) != (rank == own) for place, rank in zip(taken, of_chosen, strict=True))
        return depths(self.run, layers, moved, ranks, self.spread.fullest // parts)

    def _holders(self, spread: TokenAssignment) -> list[int]:
        """Return, for each position, which of the ranks that share a sequence has the token.

        Counts like `shoal.engine.parallel.mixture_of_depths`.
        """
        parts, holders = self.run.layout.sequence_shards, [0] * spread.tokens
        for cp in range(self.run.layout.cp):
            places = [token for chunk in spread.chunks(cp) for token in chunk]
            for i, place in enumerate(places):
                holders[place] = cp * parts + i * parts // len(places)
        return holders

    def _data_parallel(self, stage: int) -> Sent:
        """Return the bytes of a stage's gathers and reductions."""
        layout, policy, mesh = self.run.layout, self.policy, self.mesh
        actions = [action for action in self.actions if action.stage == stage]
        last = sum(action.op is Op.REDUCE for action in actions)
        passes = sum(action.op in WEIGHTS for action in actions) if layout.zero >= 2 else last
        filled = self._filled(stage)
        chunks = self._chunks(filled)
        gathers = [sum(action.op is Op.GATHER for action in actions)] * len(chunks)
        if layout.zero == 3:
            gathers = count_gathers(layout, filled.used, self.actions, stage)
        sent = Sent()
        for bucket, chunk, times in zip(filled.buckets, chunks, gathers, strict=True):
            shard, replicate = ("edp_shard", "edp_replicate") if bucket[0].expert else ("shard", "replicate")
            others, reduced = mesh.size(shard) - 1, chunk * policy.reduce.itemsize
            sent[shard, "reduce-scatter"] += passes * others * reduced
            sent[replicate, "all-reduce"] += last * all_reduced(reduced, mesh.size(replicate))
            sent[shard, "all-gather"] += times * others * chunk * policy.compute.itemsize
        for axis, elements in self._partial(filled, chunks).items():
            sent[axis, "all-reduce"] += last * all_reduced(elements * policy.reduce.itemsize, mesh.size(axis))
        return sent

    def _chunks(self, filled: Filled) -> list[int]:
        shards = {False: self.mesh.size("shard"), True: self.mesh.size("edp_shard")}
        return [size.chunk(shards[size.expert]) for size in filled.sizes]

    def _local_elements(self, bucket: Bucket, chunk: int) -> Iterator[tuple[LocalParameter, int]]:
        """Yield the parameters of a bucket with the elements in this rank's shard."""
        start, index = 0, self.mesh.index("edp_shard" if bucket[0].expert else "shard")
        for held in in_order(bucket):
            stop = start + held.allocated
            yield held, max(0, min(stop, (index + 1) * chunk) - max(start, index * chunk))
            start = stop

    def _filled(self, stage: int) -> Filled:
        index = self.mesh.index("tp"), self.mesh.index("ep"), self.mesh.index("etp")
        return fill_buckets(self.run.shape, self.run.layout, self.parts[stage], self.policy.reduce.itemsize, *index)

    def _partial(self, stage: Filled, chunks: Sequence[int]) -> Counter[str]:
        """Return the elements in this rank's shards whose gradients also need a sum over a non-replica axis."""
        found: Counter[str] = Counter()
        for bucket, chunk in zip(stage.buckets, chunks, strict=True):
            for held, local in self._local_elements(bucket, chunk):
                if held.partial:
                    found[held.partial] += local
                if self.program.model_copies > 1 and not held.alone:
                    found[self._copies] += local
        return found

    @property
    def _copies(self) -> str:
        """Return the axis along which the model copies of this rank's stages lie."""
        pp_rank, program = self.mesh.index("pp"), self.program
        other = {program.stage_rank[(mine + program.depth) % program.stages] for mine in self.held}
        return f"pp:{','.join(map(str, sorted({pp_rank} | other)))}"

    def _once(self) -> Sent:
        """Return the bytes of sums once per step or update: tied ends, losses, norms, token counts."""
        mesh, updates = self.mesh, self.program.updates
        sent, steps = Sent(), sum(action.op is Op.STEP for action in self.actions)
        sent["dp", "all-reduce"] += all_reduced(NUMBER * updates, mesh.size("dp"))
        sent["world", "all-reduce"] += all_reduced(NUMBER * (3 if updates == 1 else 2 + updates), mesh.size("world"))
        if self.run.shape.experts:  # router statistics
            layers = len(self.run.shape.experts.layers(self.run.shape.blocks))
            counted = NUMBER * layers * (ROUTED + self.run.shape.experts.count)
            sent["world", "all-reduce"] += all_reduced(counted, mesh.size("world"))
        if self.run.shape.depths:  # mixture-of-depths statistics
            counted = NUMBER * len(self.run.shape.depths.layers(self.run.shape.layers)) * PREDICTED
            sent["world", "all-reduce"] += all_reduced(counted, mesh.size("world"))
        if updates > 1:  # each stage learns whether its own gradients are finite
            for axis in ("tp", "replicas"):
                sent[axis, "all-reduce"] += steps * all_reduced(NUMBER, mesh.size(axis))
        holders = enumerate(self.program.stage_rank)
        ends = sorted({rank for s, rank in holders if self.program.is_first(s) or self.program.is_last(s)})
        shared = [stage for stage in self.held if self.parts[stage].shared
                  and (self.parts[stage].first or self.parts[stage].last)]
        if shared and mesh.index("pp") in ends:
            of_stage, axis = self._filled(shared[0]), f"pp:{','.join(map(str, ends))}"
            elements = sum(
                local for bucket, chunk in zip(of_stage.buckets, self._chunks(of_stage), strict=True)
                for held, local in self._local_elements(bucket, chunk) if held.alone
            )
            sent[axis, "all-reduce"] += steps * all_reduced(elements * self.policy.reduce.itemsize, mesh.size(axis))
        return sent


def count_gathers(
    layout: Layout, units: Sequence[Sequence[int]], actions: Sequence[Action], stage: int
) -> list[int]:
    """Return how often each bucket of a stage is gathered per step (`shoal.engine.parallel.zero.zero3_hooks`).

    The buckets of a unit (the embedding, a layer, the final norm and head) are gathered before use, together with the
    next units' buckets. They are freed after the unit's forward, unless its backward comes next, and after its
    backward.

    Args:
        units: for each unit of the stage, the numbers of the buckets it needs.
        actions: of the rank.
    """
    keep = int(backward_follows(actions, stage)) if layout.reshard_after_forward else len(units)
    kept = range(len(units) - keep, len(units))
    gathered: set[int] = set()
    found, version = [0] * (1 + max(bucket for unit in units for bucket in unit)), None

    def use(several: Sequence[int]) -> None:
        for bucket in {bucket for unit in several for bucket in units[unit]} - gathered:
            found[bucket] += 1
            gathered.add(bucket)

    for action in actions:
        if action.op is Op.STEP:  # the shards have changed
            gathered.clear()
        if action.stage != stage or action.op not in FORWARDS | BACKWARDS:
            continue
        if action.version != version:  # other weights are used from here on
            version = action.version
            gathered.clear()
        for unit in range(len(units)) if action.op in FORWARDS else range(len(units))[::-1]:
            if action.op in FORWARDS:
                ahead = range(unit, min(unit + layout.prefetch + 1, len(units)))
                use(ahead)
                if unit not in kept:
                    gathered -= set(units[unit]) - {bucket for other in ahead[1:] for bucket in units[other]}
            else:
                use(range(unit, max(-1, unit - layout.prefetch - 1), -1))
                first_used = set(units[unit]) - {bucket for other in range(unit) for bucket in units[other]}
                gathered -= first_used
    return found
