"""`shoal explain roofline`: what bounds each operation of a model on a device, and points measured on this machine.

An operation of intensity I [FLOPs per byte] reaches min(peak, I x bandwidth) (Williams, Waterman & Patterson 2009).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from timeit import Timer
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from shoal.base.errors import UsageError
from shoal.base.units import parse_counts, show_bytes, show_metric, show_number, show_seconds
from shoal.labs.explain.options import BatchOptions
from shoal.planning.cost.roofline import OperationCost, least_rows, matrix_product
from shoal.planning.describe import estimate
from shoal.planning.estimate import Estimate
from shoal.report.planning.estimate_page import attainable, draw_roofline, operations
from shoal.report.tables import text_table
from shoal.spec.catalog import model_shape
from shoal.spec.catalog.accelerators import Accelerator
from shoal.spec.layout import Layout

MEASURED = ((1, 1 << 22, 1), (1, 2048, 2048), (8, 2048, 2048), (64, 64, 64), (64, 2048, 2048), (256, 256, 256),
            (1024, 1024, 1024))  # fmt: skip
"""m, k, n of the products to measure: a dot product, a matrix times few rows, and squares."""
COPIED = 1 << 26  # bytes
REPEATED = 0.2  # seconds of one measurement


class RooflineOptions(BatchOptions):
    """Which operations arithmetic bounds, and which memory.

    Their intensity, the least rows that fill a device, and points measured on this machine.
    """

    cluster: str = "h100-sxm"
    """An accelerator of the catalog, or a cluster: 8xH100."""

    precision: str = "bf16"
    """Number formats: bf16, fp8, fp32 or another precision of `shoal train`."""

    product: str = ""
    """Instead of a model's operations, one product [m, k] x [k, n]: 64,8192,8192. A dot product is 1,N,1."""

    measure: bool = False
    """Instead, time products on one core of this machine, against the peak and the bandwidth that are measured too."""


class Placed(NamedTuple):
    """An operation on the roofline: its cost, and its rate in FLOP/s."""

    cost: OperationCost
    rate: float


def explain(options: RooflineOptions, console: Console) -> Callable[[], str]:
    """Print the table of operations. Returns a function that draws the roofline."""
    if options.measure:
        peak, bandwidth, points = measure_products()
        speeds = f"peak {show_metric(peak, 'FLOP/s')}, copies {show_bytes(bandwidth)}/s"
        console.print(f"one core of this machine, fp32: {speeds}", highlight=False)
        console.print(_table(points, peak, bandwidth, measured=True))
        console.print("Operands in a cache are read faster than the copies of main memory that the roof is made of.")
        return _draw(points, peak, bandwidth, "Roofline of one core of this machine, measured")
    found = _estimate(options)
    machine, policy = found.run.cluster.accelerator, found.run.policy
    peak, bandwidth, kind = found.peak, machine.memory_bandwidth, found.run.products
    costs, k, n = operations(found), found.run.shape.hidden, found.run.shape.ffn // options.tp
    if options.product:
        m, k, n = _sizes(options)
        costs = {f"{m},{k},{n}": matrix_product(m, k, n, policy.compute.itemsize)}
    points = {name: Placed(cost, attainable(found, name, cost)) for name, cost in costs.items()}
    where = f"{machine.name}, {kind}: {peak / 1e12:,.4g} TFLOP/s dense, {show_bytes(bandwidth)}/s"
    tokens = found.forward.tokens
    what = "one product" if options.product else f"{options.model}, {tokens:,} tokens on a rank, tp {options.tp}"
    console.print(f"[bold]{what}[/] on {where}", highlight=False)
    console.print(_table(points, peak, bandwidth))
    console.print(_facts(peak, machine, kind, k, n, policy.compute.itemsize))
    return _draw(points, peak, bandwidth, f"Roofline of {machine.name}, {kind}")


def _estimate(options: RooflineOptions) -> Estimate:
    shape = model_shape(options.model)
    found = estimate(
        Layout(tp=options.tp, micro_batch=options.micro_batch), model=shape, cluster=options.cluster, fill=True,
        sequence_length=options.sequence_length, precision=options.precision,
    )  # fmt: skip
    assert isinstance(found, Estimate), "no other software was named"
    return found


def _sizes(options: RooflineOptions) -> list[int]:
    sizes = parse_counts(options.product, where="--product")
    if len(sizes) != 3:
        raise UsageError(f"--product {options.product}: give m,k,n of [m, k] x [k, n], as 64,8192,8192")
    return sizes


def _draw(points: Mapping[str, Placed], peak: float, bandwidth: float, title: str) -> Callable[[], str]:
    return partial(draw_roofline, {name: (cost.intensity, rate) for name, (cost, rate) in points.items()}, peak,
                   bandwidth, title)  # fmt: skip


def _table(points: Mapping[str, Placed], peak: float, bandwidth: float, *, measured: bool = False) -> Table:
    rows = []
    for name, (cost, rate) in points.items():
        bound = "arithmetic" if cost.intensity >= peak / bandwidth else "memory"
        size = [] if measured else [show_metric(cost.flops, "FLOP"), show_bytes(cost.bytes)]  # 80 columns hold no more
        roof = [show_metric(min(peak, cost.intensity * bandwidth), "FLOP/s")] if measured else []
        shown = show_metric(rate, "FLOP/s"), f"{100 * rate / peak:.1f} %", show_seconds(cost.flops / rate)
        rows.append([name, *size, show_number(cost.intensity), bound, *roof, *shown])
    sizes, rates = ((), ("roof", "measured")) if measured else (("FLOPs", "bytes"), ("roof",))
    headings = ("m,k,n" if measured else "operation", *sizes, "FLOP/B", "bound by", *rates, "of peak", "time")
    return text_table(headings, rows, words=(0, 2 + len(sizes)), gap=1)


def _facts(peak: float, machine: Accelerator, kind: str, k: int, n: int, itemsize: int) -> Table:
    bandwidth, rows = machine.memory_bandwidth, []
    for name, rate in (("dense", peak), ("with 2:4 sparsity", machine.sparse_flops.get(kind))):
        if rate:
            rows.append((f"ridge, {name}", f"{rate / bandwidth:.0f} FLOPs per byte"))
    least, of = least_rows(k, n, peak / bandwidth, itemsize), f"[b, {k:,}] x [{k:,}, {n:,}]"
    rows.append(("least b that arithmetic bounds", f"{least:,.0f} in {of}" if least else f"none: {of} is too narrow"))
    return text_table(("", ""), rows, words=(0, 1))


def measure_products() -> tuple[float, float, dict[str, Placed]]:
    """Time `MEASURED` products and a copy on one core, in CPU time, which excludes other programs.

    Returns:
        The highest rate [FLOP/s], the bandwidth of a copy [bytes/s], and the points by name.
    """
    import torch  # slow import

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        source, target = torch.zeros(COPIED // 4), torch.zeros(COPIED // 4)
        bandwidth = 2 * COPIED / _time(lambda: target.copy_(source))
        points = {}
        for m, k, n in MEASURED:
            a, b = torch.randn(m, k), torch.randn(k, n)
            cost = matrix_product(m, k, n, itemsize=4)
            points[f"{m},{k},{n}"] = Placed(cost, cost.flops / _time(partial(torch.matmul, a, b)))
    finally:
        torch.set_num_threads(threads)
    return max(point.rate for point in points.values()), bandwidth, points


def _time(step: Callable[[], object]) -> float:
    """Return the CPU seconds of one call, the least over three series of calls."""
    step()
    timer = Timer(step, timer=time.process_time)
    calls = 1 + int(REPEATED / 3 / timer.timeit(1))
    return min(timer.repeat(3, calls)) / calls
