"""`shoal explain accelerators`: the catalog as a table, and chips side by side with every peak that is known."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from shoal.base.errors import UsageError
from shoal.base.section import Section
from shoal.base.units import show_bytes
from shoal.report.tables import text_table
from shoal.spec.catalog.accelerators import Accelerator, accelerator, accelerators
from shoal.spec.catalog.clusters import Node, link, nodes

FORMATS = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp4", "int8")
MOST = 4  # chips side by side on a terminal


class AcceleratorsOptions(Section):
    """Peak rates, memory, links and power of each accelerator.

    The catalog as a table, or some accelerators side by side with all that it has.
    """

    names: tuple[str, ...] = ()
    """Show these side by side with all that the catalog has: h100-sxm tpu-v5p tpu-v6e (default: a table of all)."""


def explain(options: AcceleratorsOptions, console: Console) -> None:
    """Print the table of all accelerators, or all that is known about some."""
    if len(options.names) > MOST:
        raise UsageError(f"--names: {len(options.names)} accelerators; at most {MOST} fit side by side.")
    chosen = [accelerator(name) for name in options.names]
    console.print(_compare(chosen) if chosen else _table())
    if chosen:
        for each in chosen:
            console.print(f"{each.name}: {each.source}", highlight=False)
    else:
        console.print("Rates are dense, of the matrix units; ridge is FLOPs per byte of memory where both are busy; "
                      "link is one direction. All of one: --names h100-sxm.", highlight=False)  # fmt: skip


def _table() -> Table:
    rows = []
    for machine in accelerators().values():
        rate = machine.dense_flops(machine.half)
        node = find_node(machine)
        rows.append((
            machine.name, f"{rate / 1e12:,.0f}", _tera(machine.peak_flops.get("fp8")), _giga(machine.memory_bytes),
            f"{machine.memory_bandwidth / 1e12:.2f}", f"{rate / machine.memory_bandwidth:.0f}",
            _giga(link(node.inside).bandwidth) if node else "", f"{machine.watts:,.0f}" if machine.watts else "",
        ))  # fmt: skip
    headings = ("", "16 bits", "fp8", "memory", "memory", "ridge", "link", "power")
    units = ("", "TFLOP/s", "TFLOP/s", "GB", "TB/s", "FLOP/B", "GB/s", "W")
    return text_table([f"{a}\n{b}" for a, b in zip(headings, units, strict=True)], rows)


def _compare(machines: list[Accelerator]) -> Table:
    rows: list[tuple[str, ...]] = []
    for kind in FORMATS:
        rows += _row(f"{kind} TFLOP/s", [_tera(m.peak_flops.get(kind)) for m in machines])
        rows += _row("  without matrix units", [_tera(m.vector_flops.get(kind)) for m in machines])
        rows += _row("  with 2:4 sparsity", [_tera(m.sparse_flops.get(kind)) for m in machines])
    rows.append(())
    found = [find_node(machine) for machine in machines]
    rows += _row("matrix units", [_units(machine) for machine in machines])
    rows += _row("memory", [show_bytes(m.memory_bytes) for m in machines])
    rows += _row("memory bandwidth", [f"{show_bytes(m.memory_bandwidth)}/s" for m in machines])
    rows += _row("ridge FLOPs per byte, dense", [f"{m.dense_flops(m.half) / m.memory_bandwidth:.0f}" for m in machines])
    sparse = [m.sparse_flops.get(m.half) for m in machines]
    ridges = [rate and f"{rate / m.memory_bandwidth:.0f}" for rate, m in zip(sparse, machines, strict=True)]
    rows += _row("ridge, with 2:4 sparsity", [ridge or "" for ridge in ridges])
    rows += _row("connected by", [_links(node) for node in found])
    rows += _row("one direction of all links", [_bandwidth(node) for node in found])
    rows += _row("in one domain", [str(node.most or node.per_node) if node else "" for node in found])
    rows += _row("power W", [f"{m.watts:,.0f}" if m.watts else "" for m in machines])
    efficient = [m.watts and m.dense_flops(m.half) / m.watts / 1e12 for m in machines]
    rows += _row("TFLOP/s per W", [f"{each:.2f}" if each else "" for each in efficient])
    rows += _row("$ per hour", [f"{m.dollars_per_hour:.2f}" if m.dollars_per_hour else "" for m in machines])
    return text_table(("", *(m.name for m in machines)), rows)


def _row(name: str, cells: list[str]) -> list[tuple[str, ...]]:
    return [(name, *cells)] if any(cells) else []


def _tera(rate: float | None) -> str:
    if not rate:
        return ""
    return f"{rate / 1e12:,.0f}" if rate >= 1e15 else f"{rate / 1e12:.4g}"


def _giga(size: float) -> str:
    return f"{size / 1e9:,.4g}"


def _units(machine: Accelerator) -> str:
    of = machine.matrix_units
    return f"{of.count} x {of.multiply_adds:,} at {of.clock / 1e9:.4g} GHz" if of else ""


def _links(node: Node | None) -> str:
    if node is None:
        return ""
    return f"{2 * node.dimensions} x {node.inside}" if node.dimensions else f"{node.inside}, switched"


def _bandwidth(node: Node | None) -> str:
    return f"{show_bytes(link(node.inside).bandwidth * 2 * (node.dimensions or 0.5))}/s" if node else ""


def find_node(machine: Accelerator) -> Node | None:
    """Return the first node type of the catalog with these accelerators."""
    return next((node for node in nodes().values() if node.accelerator == machine.name), None)
