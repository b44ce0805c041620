"""The items of the six parts, the most important ones first: those that no time is left for are not run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, get_args

from shoal.engine.kernels.example import list_kernels
from shoal.labs.bench.gpu import ceilings, equality, rivals, smoke, speed
from shoal.labs.bench.gpu.engine_run import RunPoint
from shoal.labs.bench.gpu.item import GpuSetting, Item
from shoal.spec.config.sections import OptimizerName


def first_contact(setting: GpuSetting) -> list[Item]:
    """Part 1: ceilings, calls that may not work, and a run that is killed and resumed."""
    return [
        Item("memory", "copies", ceilings.measure_copies),
        *(Item("calls that may not work", name, smoke.check_call, (name,)) for name in smoke.CALLS),
        Item("shoal train, tiny", "train", smoke.train_tiny, seconds=180),
        *(Item("products", kind, ceilings.measure_products, (kind,)) for kind in ceilings.FORMATS),
        *(
            Item("8-bit products", scales, ceilings.measure_scaled_products, (scales,))
            for scales in ("tensor", "row", "block")
        ),
        *(
            Item("attention", kernel, ceilings.measure_attention, (kernel,), seconds=150)
            for kernel in ceilings.KERNELS
        ),
    ]


def equality_with_cpu(setting: GpuSetting) -> list[Item]:
    """Part 2: the same steps on the CPU and on the device, and kernels against float64."""
    title = f"{equality.STEPS} steps on the CPU and on the device, largest relative errors"
    return [
        *(Item("kernels against float64", name, equality.check_kernel, (name,), 120) for name in list_kernels()),
        *(Item(title, name, equality.compare_devices, (name,)) for name in equality.VARIANTS),
        Item("number formats against float64", "formats", equality.compare_precisions, seconds=90),
        Item("the same steps twice", "twice", equality.repeat_steps),
        Item("memory checker", "memcheck", equality.check_memory, seconds=180),
    ]


def ranks_on_one_device(setting: GpuSetting) -> list[Item]:
    """Part 3: layouts of many ranks on one device against one rank."""
    title, names = "layouts against one device", [*equality.LAYOUTS]
    chosen, later = setting.pick((names[:7], names[7:]), (names[:1], []))

    def layouts(names: list[str]) -> Iterator[Item]:
        for precision in equality.PRECISIONS:
            for name in names:
                yield Item(f"{title}, {precision}", name, equality.verify_layout, (name, precision), 120)

    seeds, count = setting.pick((5, 6), (1, 1))
    drawn = [
        Item(f"{title}, fp64", f"{count} drawn, seed {n}", equality.verify_drawn, (count, n), 150) for n in range(seeds)
    ]
    backend = Item("collectives of one rank", "backend", equality.check_backend)
    return [backend, *layouts(chosen), *drawn, *layouts(later)]


def _timed(title: str, name: str, point: RunPoint, *, trace: bool = False) -> Item:
    way = ", compiled" if point.compile else ", eager"
    return Item(title, name + way, speed.time_point, (point, trace), seconds=240)


SHAPES = "bf16, layers of Llama-3-8B"
RECIPES = "8-bit recipes, 4 layers of Llama-3-8B"
DEEP_RECIPES = "8-bit recipes, 16 layers of Llama-3-8B"
OTHERS = "other implementations, bf16, 8 layers of Llama-3-8B"
BESIDE = "8 layers, s 4096, b 2"
"""Name of the run that other implementations are compared with."""


def bf16_speed(setting: GpuSetting) -> list[Item]:
    """Part 4: MFU by shape, kernels, memory and time beside the estimates; small models; other implementations."""
    grid = [
        *((16, s, b) for b in (2, 1, 4) for s in (4096, 8192)),
        *((layers, s, 1) for layers in (4, 8) for s in (4096, 8192)),
    ]
    later = [(layers, s, b) for layers in (4, 8) for b in (2, 4) for s in (4096, 8192)]

    def points(sizes: list[tuple[int, int, int]]) -> Iterator[Item]:
        for layers, s, b in sizes:
            for way in (True, False):
                point = speed.layer_point(setting, layers, s, b, compile=way)
                first = (layers, s, b) == grid[0] and way
                yield _timed(SHAPES, f"{layers} layers, s {s}, b {b}", point, trace=first)

    beside = speed.layer_point(setting, 8, 4096, 2)
    small = [("gpt3-125m", 2048, 8), ("llama-3.2-1b", 4096, 4)]
    found = [
        *points(grid[:1]),
        *(
            Item(OTHERS, name, rivals.time_rival, (name, beside), 120)
            for name in setting.rivals
        ),
        *points([(8, 4096, 2)]),
        *(
            _timed("small models, bf16", name, speed.model_point(setting, name, s, b, compile=way))
            for name, s, b in small for way in (True, False)
        ),
        *(
            _timed("small models, bf16", f"{name}, CUDA graphs", speed.model_point(
                setting, name, s, b, compile=True, train={"cuda_graphs": True}))
            for name, s, b in small
        ),
        *points(grid[1:]),
        *points([size for size in later if size != (8, 4096, 2)]),
    ]  # fmt: skip
    return found if not setting.rehearsal else [found[0], *found[2 : 2 + len(setting.rivals)], found[-1]]


def recipes_and_rules(setting: GpuSetting) -> list[Item]:
    """Part 5: 8-bit recipes and their losses, a mixture of experts, optimizers, offload."""
    recipes = speed.list_recipes()
    moe = {"name": "olmoe-1b-7b", "layers": 4, "vocab": 50_304}
    tiny_moe = {**speed.TINY, "experts": {"count": 8, "ffn": 32, "per_token": 2}}
    mixture = RunPoint(setting.pick(moe, tiny_moe), setting.pick(4096, 32), setting.pick(4, 2))
    pairs = [("adamw", kind) for kind in ("bf16", "bf16-moments", "bf16-weights", "bf16-all")]
    pairs += [(name, "bf16") for name in ("adam8bit", "muon", "adafactor")]
    others = [name for name in get_args(OptimizerName) if (name, "bf16") not in pairs]
    offloads: dict[str, dict[str, Any]] = {
        "none": {}, "optimizer": {"offload": "optimizer"}, "parameters": {"offload": "parameters", "zero": 3},
    }  # fmt: skip

    def points(names: Iterable[str], layers: int, *, compiled: bool = False) -> Iterator[Item]:
        for name in names:
            point = speed.layer_point(setting, layers, 4096, 2, compile=compiled, **recipes[name])
            yield _timed(RECIPES if layers == 4 else DEEP_RECIPES, name, point)

    def experts(compiled: bool) -> Item:
        return _timed("mixture of experts, 4 layers", "8 of 64", replace(mixture, compile=compiled))

    def optimizers(pairs: Iterable[tuple[str, str]]) -> Iterator[Item]:
        for name, kind in pairs:
            title = "optimizers, 1.2 billion parameters"
            yield Item(title, f"{name}, {kind}", speed.measure_optimizer, (name, kind))

    return [
        *points(recipes, 4),
        Item("loss of the recipes", "loss", speed.measure_loss_gap, ([*recipes],), seconds=240),
        *points(("bf16", "fp8, tensor", "fp8, delayed"), 16),
        experts(False),
        *optimizers(pairs),
        *(
            _timed("offload, 1.2 billion parameters", name,
                   speed.model_point(setting, "llama-3.2-1b", 4096, 2, parallel={"micro_batch": 2, **layout}))
            for name, layout in offloads.items()
        ),
        *optimizers((name, "fp32" if name == "sophia-h" else "bf16") for name in others),
        *setting.pick([experts(True), *points(recipes, 4, compiled=True)], []),
    ]  # fmt: skip


def checkpoints_and_spread(setting: GpuSetting) -> list[Item]:
    """Part 6: the stall of a save, and one point of part 4 several times for the spread between processes."""
    point = speed.layer_point(setting, 8, 4096, 2)
    return [
        *(
            _timed("spread between processes", f"{BESIDE}, number {n}", point)
            for n in range(1, setting.pick(4, 2))
        ),
        Item("checkpoints in the background", "save", speed.measure_checkpoint, seconds=420),
    ]


PARTS: dict[int, tuple[str, Callable[[GpuSetting], list[Item]]]] = {
    1: ("first contact", first_contact),
    2: ("equality with the CPU", equality_with_cpu),
    3: ("ranks on one device", ranks_on_one_device),
    4: ("bf16 speed", bf16_speed),
    5: ("8-bit recipes, experts, optimizers, offload", recipes_and_rules),
    6: ("checkpoints and spread", checkpoints_and_spread),
}
"""Name and items of each part."""

UNTIMED = (2, 3)
"""Parts that measure no time: their items run side by side."""
