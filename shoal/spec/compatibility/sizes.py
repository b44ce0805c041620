"""Checks of sizes from several sections of a config, with the nearest valid sizes."""

from __future__ import annotations

import itertools
import math
from fnmatch import fnmatchcase

from shoal.base.errors import UsageError, divisors, nearest_divisors
from shoal.spec.catalog import ModelShape
from shoal.spec.compatibility.features import BARE, CheckedRun
from shoal.spec.compatibility.table import check_compatibility
from shoal.spec.config import RunConfig
from shoal.spec.layout import MOST_RANKS, Layout
from shoal.spec.number_formats import BLOCKS, FORMATS
from shoal.spec.sync_methods import LOCAL, UNSYNCHRONISED

MOST_MICROBATCHES = 2**16  # per replica: each one adds actions to its program
MOST_UNSYNCHRONISED = 64
"""Maximum number of replicas, each of which uses one bit of a shared counter."""


def check_layout(
    layout: Layout, shape: ModelShape, *, global_batch: int, sequence_length: int, ranks: int | None = None
) -> None:
    """Reject a layout that cannot run this model and batch.

    Args:
        shape: the model to split.
        global_batch: sequences per optimizer step over all replicas.
        sequence_length: tokens per sequence.
        ranks: the number of processes if already decided (torchrun, SLURM, ``--ranks``).

    Raises:
        UsageError: naming the field, its value, the equation that fails and the nearest valid values.
    """
    check_compatibility(CheckedRun(BARE.model_copy(update={"parallel": layout}), shape))
    if layout.world_size > MOST_RANKS:
        raise UsageError(f"parallel: {layout.equation()}, but there can be at most {MOST_RANKS:,}.")
    _check_data_parallel(layout, global_batch)
    _check_tensor_parallel(layout, shape, sequence_length)
    _check_context_parallel(layout, shape, sequence_length)
    _check_experts(layout, shape)
    _check_depths(layout, shape, sequence_length)
    if layout.pp > shape.layers:
        raise UsageError(
            f"parallel.pp = {layout.pp}: {shape.layers} layers cannot fill {layout.pp} stages, each needs at least one."
            f"\n  Use pp <= {shape.layers}."
        )
    if ranks is not None and ranks != layout.world_size:
        fits = _fitting(layout, ranks, shape, global_batch=global_batch, sequence_length=sequence_length)
        what_fits = f"Fits {ranks}: {', or '.join(fits)}. Or use" if fits else (
            f"No layout of {ranks} keeps all rules with this model, batch and length. Use")
        raise UsageError(
            f"parallel: {layout.equation()}, but {ranks} were given.\n  {what_fits} {layout.world_size} ranks."
        )


def _check_data_parallel(layout: Layout, global_batch: int) -> None:
    if layout.zero_shard is not None and layout.dp % layout.zero_shard:
        raise UsageError(
            f"parallel.zero_shard = {layout.zero_shard} does not divide dp {layout.dp}: "
            f"dp = dp_replicate x zero_shard.\n  Nearest that do: {_nearest(layout.zero_shard, layout.dp)}."
        )
    per_pass = layout.dp * layout.micro_batch
    if global_batch % per_pass:
        each, left = divmod(global_batch, layout.dp)
        micro_batches = sorted(nearest_divisors(layout.micro_batch, of=each)) if each and not left else []
        passes, rest = divmod(global_batch, layout.micro_batch)
        # a dp on which nothing else depends
        free = layout.zero_shard is None and layout.ep == 1 and layout.sync == "all-reduce"
        replicas = sorted(nearest_divisors(layout.dp, of=passes)) if left and not rest and free else []
        raise UsageError(
            f"train.global_batch = {global_batch} is not a multiple of dp {layout.dp} x micro_batch "
            f"{layout.micro_batch} = {per_pass}: global_batch = dp x micro_batch x microbatches."
            f"\n  Nearest global_batch that fits: {_nearest_multiples(global_batch, per_pass)}."
            + (f" Or micro_batch: {' or '.join(map(str, micro_batches))}." if micro_batches else "")
            + (f" Or dp: {' or '.join(map(str, replicas))}." if replicas else "")
        )
    if (microbatches := layout.microbatches(global_batch)) > MOST_MICROBATCHES:
        raise UsageError(
            f"train.global_batch = {global_batch} is dp {layout.dp} x micro_batch {layout.micro_batch} x "
            f"{microbatches:,} micro-batches, but a step can have at most {MOST_MICROBATCHES:,}."
            "\n  Use a larger micro_batch or dp."
        )


def _check_tensor_parallel(layout: Layout, shape: ModelShape, sequence_length: int) -> None:
    if layout.tp == 1:
        return
    if why := _tp_misfit(layout.tp, shape):
        fits = sorted(
            (tp for tp in divisors(shape.heads) if not _tp_misfit(tp, shape)), key=lambda tp: abs(tp - layout.tp)
        )
        raise UsageError(
            f"parallel.tp = {layout.tp} {why}.\n  Nearest tp that fits the model: {' or '.join(map(str, fits[:2]))}."
        )
    if layout.tp_x > 1:
        _check_grid(layout, shape)
    parts = layout.sequence_shards
    if sequence_length % parts:
        near = max(sequence_length, 2 * layout.cp * parts if layout.cp > 1 else 0)
        name = "tp" if layout.tp_x == 1 else "tp / tp_x ="
        raise UsageError(
            f"data.sequence_length = {sequence_length} is not a multiple of {name} {parts}, as sequence parallelism "
            f"needs: each rank takes sequence_length / {parts} tokens."
            f"\n  Nearest lengths that are: {_nearest_multiples(near, parts)}."
        )


def _tp_misfit(tp: int, shape: ModelShape) -> str:
    """Return why a tensor-parallel degree does not fit a model; empty if it does."""
    sizes = {"heads": shape.heads}
    if not all(shape.sparse(layer) for layer in range(shape.layers)):
        sizes["ffn"] = shape.ffn
    if shape.experts is not None and shape.experts.shared:
        sizes["experts.shared x ffn"] = shape.experts.shared * shape.experts.ffn
    for what, size in sizes.items():
        if size % tp:
            return f"does not divide model.{what} = {size}: each rank takes {what} / tp of them"
    if not _shares_heads(tp, shape.kv_heads):
        return (
            f"fits model.kv_heads = {shape.kv_heads} neither way: tp must divide kv_heads (each rank takes some) or be "
            "a multiple of it (each head is replicated)"
        )
    return ""


def _shares_heads(ranks: int, kv_heads: int) -> bool:
    """Return whether ranks can share key/value heads: each rank has several, or several ranks replicate each head."""
    return kv_heads % ranks == 0 or ranks % kv_heads == 0


def _check_grid(layout: Layout, shape: ModelShape) -> None:
    """Check 2-D tensor parallelism."""
    x, y = layout.tp_x, layout.tp_y
    fits = [
        n for n in divisors(layout.tp)[:-1]
        if shape.hidden % n == 0 and _shares_heads(layout.tp // n, shape.kv_heads)
    ]
    if x not in fits:
        if layout.tp % x or x == layout.tp:
            why = f"does not make a grid of tp {layout.tp}: it must divide it, and be less"
        elif shape.hidden % x:
            why = f"does not divide model.hidden = {shape.hidden}, of which each rank takes hidden / tp_x"
        else:
            why = (
                f"leaves tp / tp_x = {y}, which fits model.kv_heads = {shape.kv_heads} neither way: it must divide "
                "them or be a multiple of them"
            )
        raise UsageError(f"parallel.tp_x = {x} {why}.\n  Fits tp {layout.tp}: {', '.join(map(str, fits))}.")


def _check_context_parallel(layout: Layout, shape: ModelShape, sequence_length: int) -> None:
    heads, kv = shape.heads // layout.tp, max(1, shape.kv_heads // layout.tp)
    fits = [n for n in divisors(layout.cp) if heads % n == 0 and _shares_heads(n, kv)]
    if layout.ulysses not in fits:
        if layout.cp % layout.ulysses:
            why = f"does not divide cp {layout.cp}: cp = ring x ulysses."
        else:
            of_tp = f" of a tensor-parallel rank (tp {layout.tp})" if layout.tp > 1 else ""
            why = (
                f"does not fit the {heads} heads and {kv} key/value heads{of_tp}: it must divide the heads, and "
                "divide the key/value heads or be a multiple of them."
            )
        raise UsageError(
            f"parallel.ulysses = {layout.ulysses} {why}\n  Fits cp {layout.cp}: {', '.join(map(str, fits))}."
        )
    least = 2 * layout.cp * layout.sequence_shards
    if layout.cp > 1 and sequence_length < least:
        each = " x tp" if layout.sequence_parallel else ""
        raise UsageError(
            f"data.sequence_length = {sequence_length} is too short for cp {layout.cp}: it needs 2 x cp{each} = "
            f"{least} tokens.\n  Use a longer sequence, or parallel.cp <= "
            f"{max(1, sequence_length // (2 * layout.sequence_shards))}."
        )


def _check_experts(layout: Layout, shape: ModelShape) -> None:
    experts = shape.experts
    if experts is None:
        return
    ranks, ep, etp = math.prod(layout.shape[1:]), layout.ep, layout.expert_tensor
    if ranks % (ep * etp):
        name, near = ("etp", _nearest(etp, ranks)) if ranks % etp else ("ep", _nearest(ep, ranks // etp))
        raise UsageError(
            f"parallel: ep {ep} x etp {etp} = {ep * etp} does not divide dp {layout.dp} x cp {layout.cp} x tp "
            f"{layout.tp} = {ranks}, the ranks of a pipeline stage, over which experts are spread."
            f"\n  Nearest {name} that fits: {near}."
        )
    for name, degree, what, size in (
        ("ep", ep, "count", experts.count), ("etp", etp, "ffn", experts.ffn)
    ):
        if size % degree:
            raise UsageError(
                f"parallel.{name} = {degree} does not divide model.experts.{what} = {size}: each rank takes as "
                f"much.\n  Nearest {name} that fits: {_nearest(degree, size)}."
            )


def _check_depths(layout: Layout, shape: ModelShape, sequence_length: int) -> None:
    if shape.depths is None:
        return
    taken, field = shape.depths.taken(sequence_length), f"model.depths.capacity = {shape.depths.capacity}"
    if taken % layout.sequence_shards:
        raise UsageError(
            f"{field} takes {taken} of {sequence_length} tokens, which is not a multiple of tp {layout.tp}, as "
            "sequence parallelism needs: each rank computes taken / tp of them.\n  Nearest that are: "
            f"{_nearest_multiples(taken, layout.tp)}; set model.depths.capacity to one of them / {sequence_length}."
        )
    least = 2 * layout.cp * layout.sequence_shards
    if layout.cp > 1 and taken < least:
        raise UsageError(
            f"{field} takes {taken} of {sequence_length} tokens, too few for cp {layout.cp}: it needs {least}, two "
            "chunks for each rank.\n  Use a larger capacity, or a smaller parallel.cp."
        )


def _fitting(layout: Layout, ranks: int, shape: ModelShape, **sizes: int) -> list[str]:
    """Return valid degrees for this number of ranks, nearest first: changes of one degree, else of two."""
    found = []
    contexts = divisors(ranks) if layout.cp > 1 else (1,)
    for pp, tp, cp in itertools.product(divisors(ranks), divisors(ranks), contexts):
        if ranks % (pp * tp * cp):
            continue
        degrees = {"pp": pp, "dp": ranks // (pp * tp * cp), "cp": cp, "tp": tp}
        try:
            check_layout(layout.model_copy(update=degrees), shape, **sizes)
        except UsageError:
            continue
        changed = {name: degree for name, degree in degrees.items() if degree != getattr(layout, name)}
        distance = sum(abs(math.log2(degree / getattr(layout, name))) for name, degree in changed.items())
        first, *more = (f"{name} {degree}" for name, degree in changed.items())
        text = f"{first} with {' and '.join(more)}" if more else first
        found.append((len(changed), distance, text))
    single = [text for changes, _, text in sorted(found) if changes == 1]
    return single or [text for _, _, text in sorted(found)[:2]]


def _nearest(value: int, of: int) -> str:
    """Describe the divisors of ``of`` nearest to a value."""
    return " or ".join(map(str, nearest_divisors(value, of=of)))


def _nearest_multiples(value: int, of: int) -> str:
    below = value // of * of
    return f"{below} or {below + of}" if below else f"{of}"


def float8_layers(shape: ModelShape, keep: tuple[str, ...]) -> list[str]:
    """Return the names of linear layers that multiply in 8 bits: all in the model's blocks, except `keep`.

    Args:
        shape: a model without experts.
        keep: patterns of names.

    >>> from shoal.spec.catalog import model_shape
    >>> float8_layers(model_shape("tiny-gpt"), ("layers.[1-9].*", "*.attention.*"))
    ['layers.0.mlp.up', 'layers.0.mlp.down']
    """
    feed_forward = ("gate", "up", "down") if shape.family == "llama" else ("up", "down")
    attention = ["q", "k", "v"]
    if shape.latent is not None:
        attention = ["q_down", "q_up"] if shape.latent.query_rank else ["q"]
        attention += ["kv_down", "kv_up"]
    parts = [*(f"attention.{name}" for name in [*attention, "out"]), *(f"mlp.{name}" for name in feed_forward)]
    names = [f"layers.{layer}.{part}" for layer in range(shape.layers) for part in parts]
    return [name for name in names if not any(fnmatchcase(name, pattern) for pattern in keep)]


def float8_products(shape: ModelShape, keep: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return these layers in tuples of those that are one product: q, k and v, and gate and up, without biases.

    >>> from shoal.spec.catalog import model_shape
    >>> float8_products(model_shape("tiny"), ("layers.[1-9].*", "*.up", "*.down"))
    [('layers.0.attention.q', 'layers.0.attention.k', 'layers.0.attention.v'), ('layers.0.attention.out',), \
('layers.0.mlp.gate',)]
    """
    layers, joined = float8_layers(shape, keep), joined_layers(shape)
    groups: dict[str, tuple[str, ...]] = {name: (name,) for name in layers}
    for block in dict.fromkeys(name.rpartition(".")[0] for name in layers):
        for parts in joined:
            names = tuple(f"{block}.{part}" for part in parts)
            if all(name in groups for name in names):
                groups[names[0]] = names
                for name in names[1:]:
                    del groups[name]
    return list(groups.values())


def joined_layers(shape: ModelShape) -> list[tuple[str, ...]]:
    """Return names of linear layers without biases that have one input, and are one product in 8 bits."""
    if shape.family == "gpt":
        return []
    return [("gate", "up")] if shape.qkv_bias else [("gate", "up"), ("q", "k", "v")]


def check_float8_sizes(config: RunConfig, shape: ModelShape) -> None:
    """Reject 8-bit products whose scales a rank cannot compute as a single device would.

    Raises:
        UsageError: naming the sizes that do not fit.
    """
    precision, layout, float8 = config.train.precision, config.parallel, config.float8
    products = FORMATS[precision].products
    if products == "compute":
        return
    field = f"train.precision = '{precision}'"
    if shape.kv_heads % layout.tp:
        raise UsageError(
            f"{field} with parallel.tp = {layout.tp} and kv_heads = {shape.kv_heads}: ranks that share a key/value "
            "head hold terms of its gradient, which do not round as their sum does."
            f"\n  Use a tp that divides {shape.kv_heads}."
        )
    names = float8_layers(shape, ())
    for pattern in float8.keep:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UsageError(
                f"float8.keep: '{pattern}': it matches no linear layer of the model's blocks.\n  These are "
                f"{', '.join(name for name in names if '.0.' in name)}, ..; * matches anything."
            )
    if layout.tp == 1 or (products == "float8" and float8.scales != "block"):
        return
    block = BLOCKS.get(products, float8.block)
    if shape.latent is not None and layout.sequence_parallel:
        raise UsageError(
            f"{field} with parallel.sequence_parallel and model.latent: blocks of tokens are cut between the ranks "
            "that compute latents.\n  Leave sequence_parallel out, or set float8.scales to 'tensor' or 'row'."
        )
    heads, query, value = shape.heads, shape.query_dim, shape.value_dim
    sizes = {f"heads x {query}, of queries": heads * query, "ffn": shape.ffn}
    if shape.latent is None:
        sizes["kv_heads x head_dim"] = shape.kv_heads * value
    else:
        sizes[f"heads x {shape.head_dim + value}, of keys and values"] = heads * (shape.head_dim + value)
        sizes[f"heads x {value}, of values"] = heads * value
    for name, size in sizes.items():
        if size % (layout.tp * block):
            raise UsageError(
                f"{field} with parallel.tp = {layout.tp} and {name} = {size}: a rank's {size // layout.tp} cut a block "
                f"of {block}, whose scale one device takes from all of it."
                f"\n  Use a model in which {name} is a multiple of tp x {block} = {layout.tp * block}, or another tp."
            )


def check_relaxed_sizes(config: RunConfig) -> None:
    """Reject groups of replicas and averaging intervals that do not fit the run.

    Raises:
        UsageError: naming the sizes and one that fits.
    """
    layout, sync, relaxed = config.parallel, config.parallel.sync, config.relaxed
    if sync in LOCAL:
        every = relaxed.local_steps
        intervals = (
            ("train.validate_every", config.train.validate_every), ("checkpoint.every", config.checkpoint.every)
        )
        for name, steps in intervals:
            if steps % every:
                raise UsageError(
                    f"{name} = {steps} with relaxed.local_steps = {every}: between two averages there is no model that "
                    f"all replicas have.\n  Use a multiple of {every}, or 0 for the end alone."
                )
        log = config.metrics.log_every
        if log % every and every % log:
            raise UsageError(
                f"metrics.log_every = {log} with relaxed.local_steps = {every}: the replicas exchange their losses "
                f"when they average.\n  Use a multiple of {every}."
            )
    if sync in UNSYNCHRONISED and layout.dp > MOST_UNSYNCHRONISED:
        raise UsageError(
            f"parallel.sync = '{sync}' with parallel.dp = {layout.dp}: which of its replicas live is one number of "
            f"{MOST_UNSYNCHRONISED} bits.\n  Use parallel.dp <= {MOST_UNSYNCHRONISED}."
        )
    if sync == "wagma" and relaxed.group % 2 and relaxed.group < layout.dp:
        raise UsageError(
            f"relaxed.group = {relaxed.group}: groups are made of pairs."
            f"\n  Use an even number, or {layout.dp} for all."
        )
