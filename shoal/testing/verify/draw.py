"""Draw runs that are valid by construction: any layout of up to 8 ranks, with a small model of awkward sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from shoal.pipeline.schedules import SCHEDULES
from shoal.spec.catalog import model_shape
from shoal.spec.compatibility import features
from shoal.spec.compatibility.features import BARE, CheckedRun
from shoal.spec.compatibility.table import is_excluded
from shoal.spec.config import OptimizerConfig, RunConfig, build_config
from shoal.spec.layout import Layout
from shoal.spec.optimizers import SOPHIA_PRECISIONS

Choose = Callable[[Sequence[Any]], Any]
MOST_RANKS = 8


def draw_run(choose: Choose, max_ranks: int = MOST_RANKS, *, routers: bool = True) -> RunConfig:
    """Draw a run that `shoal train` accepts.

    Sizes are small and odd on purpose: a vocabulary that tp does not divide, layers that pp does not divide, fewer
    key/value heads than tp, widths that no shard divides.

    Args:
        choose: selects an option (the simplest is first): ``random.Random(seed).choice``, or a draw of hypothesis.
        routers: whether layers may have experts or Mixture of Depths.
    """
    parallel, accumulation, depth = _draw_axes(choose, max_ranks)
    layout = Layout(**parallel)
    drawn = CheckedRun(BARE.model_copy(update={"parallel": layout}), model_shape("tiny"))
    ulysses = choose([n for n in (1, 2, 3, 4) if layout.cp % n == 0])
    routed = routers and not is_excluded(features.EXPERTS, drawn) and not is_excluded(features.DEPTHS, drawn)
    sparse = _draw_experts(choose, parallel, layout.dp * layout.cp * layout.tp) if routed else {}
    model = _draw_sizes(choose, layout, depth, ulysses, sparse)
    parts = layout.tp // layout.tp_x if layout.sequence_parallel else 1  # in which tensor-parallel ranks split tokens
    if layout.cp > 1:
        parallel["ulysses"] = ulysses
        if ulysses < layout.cp:
            parallel["cp_order"] = choose(("zig-zag", "striped", "contiguous"))
        # the minimum for every rank, and more
        length = parallel.get("sequence_slices", 1) * 2 * layout.cp * parts + choose((0, 1, 5)) * parts
    else:
        length = parts * choose((2, 3)) if layout.sequence_parallel else choose((4, 7, 10))
    data = {"source": "synthetic", "sequence_length": length, "document_mask": choose((False, True))}
    train = {
        "global_batch": layout.dp * layout.micro_batch * accumulation,
        "precision": "fp64",
        "attention": choose(("sdpa", "explicit")),
        "seed": choose(range(100)),
    }
    _draw_transfers(choose, parallel, drawn)
    if depth > 1:  # all remaining layers on the first stage, or on the last
        more = model["layers"] - depth
        uneven = [(1 + more, *[1] * (depth - 1)), (*[1] * (depth - 1), 1 + more)]
        parallel["stage_layers"] = choose((None, *uneven))
    if routed:
        model["depths"] = _draw_depths(choose, length, model["layers"], layout.cp, parts)
    if model["name"] == "tiny":
        _draw_llama(choose, model, layout.tp_x, prediction=not is_excluded(features.MTP, drawn))
    model["scaled_embedding"] = choose((False, True))
    model["softcap"], model["logit_softcap"] = choose((None, None, 0.3)), choose((None, 0.5))
    if not model.get("depths") and choose((False, True)):
        _draw_window(choose, model)
    return build_config({"model": model, "parallel": parallel, "data": data, "train": train})


def draw_run_with(optimizer: str, choose: Choose) -> RunConfig:
    """Draw a run of 3 steps with this update rule and matrices large enough for states in blocks."""
    rule = OptimizerConfig(name=cast(Any, optimizer))
    bare = CheckedRun(BARE.model_copy(update={"optimizer": rule}), model_shape("tiny"))
    run = draw_run(choose, routers=not is_excluded(features.EXPERTS, bare))
    settings: dict[str, Any] = {"name": optimizer, "learning_rate": 1e-2}
    if optimizer in SOPHIA_PRECISIONS:  # with a small scale, nearly all elements would be clipped
        settings |= {"hessian_every": 2, "hessian_scale": 100.0}
    wide = choose((13, 22) if run.parallel.tp_x == 1 else (14, 22))
    model = run.model.model_copy(update={"hidden": wide, "ffn": run.parallel.tp * choose((40, 131))})
    if is_excluded(features.MTP, bare):
        unset = BARE.model.model_dump()
        model = model.model_copy(update={name: unset[name] for name in ("mtp_depth", "mtp_weight")})
    settings["schedule"] = choose(("cosine", "linear", "wsd", "inverse-sqrt", "constant"))
    settings["warmup_steps"] = choose((0, 1, 2))  # of 3 steps, in which all schedules differ
    settings["lr_factors"] = choose(({}, {"embed.*": 0.5, "*norm*": 2.0, "layers.1.*": 0.25}))
    return run.replace(train={"steps": 3}, optimizer=settings, model=model)


def _draw_axes(choose: Choose, max_ranks: int) -> tuple[dict[str, Any], int, int]:
    """Draw the axes of a layout; return it with the number of micro-batches and of pipeline stages."""
    pp = choose([n for n in (1, 2, 3, 4) if n <= max_ranks])
    tp = choose([n for n in (1, 2, 4, 3) if pp * n <= max_ranks])
    cp = choose([n for n in (1, 1, 2, 4, 3) if pp * tp * n <= max_ranks])  # leaves ranks for dp
    dp = choose([n for n in (1, 2, 4, 3, 4, 8) if pp * tp * cp * n <= max_ranks])
    accumulation = choose((2, 1, 3, 5, 4, 8))
    schedule, virtual = choose([
        (name, stages)
        for name in ("1f1b", *(name for name in SCHEDULES if name != "1f1b"))
        for stages in ((1, 2, 3) if SCHEDULES[name].virtual is None else (None,))
        if not SCHEDULES[name].refuses(pp, accumulation, stages or SCHEDULES[name].virtual or 1)
    ])
    depth = pp * (virtual or SCHEDULES[schedule].virtual) // SCHEDULES[schedule].model_copies
    zero = choose((0, 1, 2, 3))
    tp_x = choose((1, 2)) if tp == 4 else 1
    sequence_parallel = tp > 1 and choose((False, True))
    parallel = {
        "dp": dp,
        "zero": zero,
        "tp": tp,
        "sequence_parallel": sequence_parallel,
        "cp": cp,
        "pp": pp,
        "schedule": schedule,
        "micro_batch": choose((1, 2, 3)),
        "recompute": choose(("none", "selective", "full")),
        "bucket_mb": choose((25.0, 0.004)),
    }
    if tp_x > 1:
        parallel["tp_x"] = tp_x
    if virtual:
        parallel["virtual_stages"] = virtual
    if schedule == "terapipe":
        parallel["sequence_slices"] = choose((2, 1, 3) if not sequence_parallel else (2, 1))
    if zero:
        parallel["zero_shard"] = choose([n for n in (dp, 2, 1, 3, 2) if dp % n == 0])
    return parallel, accumulation, depth


def _draw_transfers(choose: Choose, parallel: dict[str, Any], drawn: CheckedRun) -> None:
    """Draw what overlaps with computation, and what is kept where."""
    zero_3 = parallel["zero"] == 3
    parallel["overlap"] = choose((True, False))
    if not is_excluded(features.TP_OVERLAP, drawn):
        parallel["tp_overlap"] = choose((True, False))
    if Layout(**parallel).overlaps_rows(background=True):
        parallel["ep_overlap"] = choose((True, False))
    parallel["offload"] = choose(("none", "optimizer", "parameters") if zero_3 else ("none", "optimizer"))
    if zero_3:
        parallel["prefetch"] = choose((1, 0, 2))
        parallel["reshard_after_forward"] = choose((True, False))


def _draw_sizes(
    choose: Choose, layout: Layout, depth: int, ulysses: int, sparse: dict[str, Any]
) -> dict[str, Any]:
    """Draw the sizes of a model with these experts that the layout can split."""
    tp, heads = layout.tp, layout.tp * ulysses * choose((1, 2))
    return {
        "name": choose(("tiny", "tiny-gpt")),
        "layers": max(depth + choose((0, 1, 2)), sparse.get("first", 0) + sparse.get("every", 1)),
        "hidden": choose((8, 13, 22) if layout.tp_x == 1 else (8, 14, 22)),
        "heads": heads,
        "kv_heads": choose([
            n for n in range(heads, 0, -1)
            if heads % n == 0 and (n % tp == 0 or tp % n == 0)  # hence also for tp / 2
            and (max(1, n // tp) % ulysses == 0 or ulysses % max(1, n // tp) == 0)
        ]),
        "head_dim": choose((4, 6)),
        "ffn": tp * choose((3, 8)),
        "vocab": choose((257, 260, 262)),
        "tied": choose((False, True)),
        "experts": sparse,
    }


def _draw_llama(choose: Choose, model: dict[str, Any], tp_x: int, *, prediction: bool) -> None:
    """Draw into the model what only the family of Llama has.

    Args:
        prediction: whether it may predict several tokens.
    """
    if tp_x == 1:
        model |= _draw_latent(choose, model["heads"])
    if prediction and not model.get("depths"):
        model |= choose(({}, {}, {"mtp_depth": 1}, {"mtp_depth": 2, "mtp_weight": 1.0}))
    latent = bool(model.get("latent"))
    model |= choose(({}, {"post_norm": "also"}, {"post_norm": "only"}))
    heads_alone = tp_x == 1 and not latent
    norms = ({}, *({"qk_norm": True, more: True} for more in ("qk_norm", "joint_qk_norm", "plain_qk_norm")))
    model |= choose(norms if heads_alone else ({},))
    model["qkv_bias"] = not latent and choose((False, False, True))
    model["out_bias"] = not latent and choose((False, False, True))
    model["sinks"] = heads_alone and choose((False, False, True))
    model["activation"] = choose((None, "clamped") if model["experts"] else (None, None, "gelu", "clamped"))
    model["query_scalar"] = None if latent else choose((None, 5))


def _draw_window(choose: Choose, model: dict[str, Any]) -> None:
    """Draw into the model which layers see only a window, and their positions."""
    model["window"] = choose((3, 1, 2, 5))
    model["pattern"] = choose(((), ("local", "global"), ("global", "local", "local")))
    model["chunked"] = choose((False, True))
    if model["name"] == "tiny" and not model.get("latent"):
        model["local_rope_theta"] = choose((None, 100.0))
        far = {"global_rope": False}
        model |= choose(({}, far, far | {"temperature": 0.7, "temperature_floor": 3}))


def _draw_experts(choose: Choose, parallel: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Draw the experts of a model, or none, and write their degrees on a stage's ranks into ``parallel``."""
    gate = choose(("",) * 4 + ("top-k", "switch", "gshard", "noisy-top-k", "expert-choice"))
    if not gate:
        return {}
    tp = parallel["tp"]
    etp = choose([n for n in (tp, 1, 2) if ranks % n == 0])
    ep = choose([n for n in (1, 2, 4, 3, 8) if ranks % (n * etp) == 0])
    if ep > 1:
        parallel["ep"] = ep
    if etp != tp:
        parallel["etp"] = etp
    experts = {
        "count": ep * choose((2, 3) if ep == 1 else (1, 2)),
        "ffn": etp * choose((3, 5)),
        "gate": gate,
        "first": choose((0, 1)),
        "every": choose((1, 2)),
        "shared": tp * choose((0, 1)),
        "capacity_factor": choose((0.0, 0.6, 1.0, 1.5)),
        "z_loss": choose((0.0, 0.1)),
    }
    if gate != "expert-choice":
        experts["balance_loss"] = choose((0.0, 1.0))
    if gate == "gshard":
        experts["count"] = max(2, experts["count"])
    if gate in ("top-k", "noisy-top-k"):
        experts["per_token"] = choose([n for n in (2, 1, 3) if n <= experts["count"]])
    if gate == "top-k":
        experts["groups"] = choose([n for n in (1, 2, 3) if experts["count"] % n == 0])
        size = experts["count"] // experts["groups"]
        fit = [n for n in range(1, experts["groups"] + 1) if n * size >= experts["per_token"]]
        experts["groups_per_token"] = choose(fit)
        experts |= {
            "score": choose(("softmax", "sigmoid")), "normalise": choose((True, False)), "scale": choose((1.0, 2.5)),
            "bias_update": choose((0.0, 0.01)), "biases": choose((False, True)),
            "scales_input": experts["per_token"] == 1 and choose((False, True)),
        }
    return experts


def _draw_latent(choose: Choose, heads: int) -> dict[str, Any]:
    """Draw multi-head latent attention, or none."""
    if not choose((False, False, True)):
        return {}
    latent = {"key_value_rank": choose((5, 8)), "rotary_dim": choose((2, 4)), "query_rank": choose((6, None)),
              "value_dim": choose((None, 3, 5))}  # fmt: skip
    return {"kv_heads": heads, "latent": {name: value for name, value in latent.items() if value}}


def _draw_depths(choose: Choose, length: int, layers: int, cp: int, multiple: int) -> dict[str, Any]:
    """Draw Mixture of Depths, or none; a rank's tokens must be a multiple of ``multiple``."""
    least = 2 * cp * multiple if cp > 1 else 1
    fit = [n / length for n in range(least, length + 1) if n % multiple == 0]
    if not choose((False, False, True)):
        return {}
    first, every = choose([(first, every) for first in (0, 1) for every in (2, 1) if first + every <= layers])
    return {
        "capacity": choose(fit), "first": first, "every": every,
        "weight": choose(("score", "sigmoid")), "predictor": choose((3, 5)),
    }
