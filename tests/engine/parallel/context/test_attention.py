"""Attention over a spread sequence is attention over the whole one, both ways, and keeps 1/cp of its bytes."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.engine import kernels
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.models import attention_kernels
from shoal.engine.models.attention import AttentionCore, causal_mask, document_mask
from shoal.engine.parallel.context.apply import ContextAttention, ContextMask, ContextParallel
from shoal.engine.parallel.context.causal_blocks import token_positions
from shoal.engine.parallel.context.ring import RingPosition
from shoal.engine.parallel.context.token_order import assign_tokens
from shoal.launch.worker_pool import Pool
from shoal.spec.layout import Layout


@dataclass(frozen=True)
class Case:
    """One attention: b sequences of s tokens, a and k heads of width d."""

    layout: Layout
    b: int
    s: int
    a: int
    k: int
    d: int
    documents: bool = False
    kernel: str = "sdpa"
    dtype: torch.dtype = torch.float64
    slices: tuple[int, ...] = ()
    lengths: bool = False
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


def inputs(case: Case) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """q, k, v, the output's gradient [b, heads, s, d], and documents [b, s]; the same on every rank."""
    generator = torch.Generator().manual_seed(7)
    whole = [
        torch.randn(case.b, heads, case.s, case.d, generator=generator, dtype=torch.float64).to(case.dtype)
        for heads in (case.a, case.k, case.k, case.a)
    ]
    ends = torch.rand(case.b, case.s, generator=generator) < 3 / case.s
    return whole, (ends.cumsum(1) - ends.long()).int() if case.documents else None


def here(case: Case) -> ContextParallel:
    mesh = Mesh(case.layout, dist.get_rank())
    held = assign_tokens(case.layout, case.s, case.slices)
    return ContextParallel(mesh.index("cp"), held, RingPosition.from_mesh(mesh), mesh.group("ulysses"))


def errors(case: Case) -> list[float]:
    """Return the largest differences of this rank's output, dq, dk and dv from one device's, and of the ranks' d sinks.

    With ``lengths`` by the operators that call fused kernels on CUDA, in any format.
    """
    with pytest.MonkeyPatch.context() as patch:
        if case.lengths:
            patch.setattr(attention_kernels, "choose_kernels", lambda *of: ("flash",))
            patch.setattr(kernels, "use_fused", lambda x: True)
        return _errors(case)


def _errors(case: Case) -> list[float]:
    (q, k, v, gradient), documents = inputs(case)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    if documents is None:
        mask = causal_mask(case.s, case.s, q.device, case.window)[None, None]
    else:
        mask = document_mask(documents, case.s, case.window)
    more = torch.linspace(-1, 1, case.a, dtype=torch.float64).requires_grad_() if case.sinks else None
    expected = AttentionCore(softcap=case.softcap)(*leaves, mask, more)
    expected.backward(gradient.double())
    at = here(case)
    mine = token_positions(at.tokens.chunks(at.rank), q.device)
    own = [x[:, :, mine].detach().requires_grad_() for x in (q, k, v)]
    start, out = 0, []
    sinks = None if more is None else more.detach().to(case.dtype).requires_grad_()
    for length in at.tokens.lengths(at.rank) if case.slices else [len(mine)]:
        stop = start + length
        core = AttentionCore(case.kernel, case.window, case.softcap)
        mask = ContextMask(at, case.d if core.kernel == "sdpa" else None, case.window)(start, length, documents, q)
        attend = ContextAttention(at, core)
        out.append(attend(own[0][:, :, start:stop], own[1][:, :, :stop], own[2][:, :, :stop], mask, sinks))
        start = stop
    found = torch.cat(out, 2)
    found.backward(gradient[:, :, mine])
    pairs = [(found, expected), *((x.grad, y.grad) for x, y in zip(own, leaves, strict=True))]
    found = [(x.double() - y[:, :, mine]).abs().max().item() for x, y in pairs]
    if sinks is None or more is None:
        return found
    dist.all_reduce(total := sinks.grad.double())
    return [*found, (total - more.grad).abs().max().item()]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    cp = draw(st.sampled_from([2, 3, 4, 6]))
    ulysses = draw(st.sampled_from([n for n in (1, 2, 3, 4, 6) if cp % n == 0]))
    order = draw(st.sampled_from(["zig-zag", "striped", "contiguous"])) if ulysses < cp else "zig-zag"
    kv = draw(st.integers(1, 4))
    if kv % ulysses and ulysses % kv:
        kv = ulysses
    groups = draw(st.sampled_from([n for n in range(1, 7) if kv * n % ulysses == 0]))
    least = 2 * cp
    s = draw(st.integers(least, 40))
    slices = (draw(st.integers(least, s - least)),) if s >= 2 * least and draw(st.booleans()) else ()
    return Case(
        Layout(cp=cp, ulysses=ulysses, cp_order=order), b=draw(st.integers(1, 2)), s=s, a=kv * groups, k=kv,
        d=draw(st.sampled_from([2, 6, 8])), documents=draw(st.booleans()),
        kernel=draw(st.sampled_from(["sdpa", "explicit"])), lengths=draw(st.booleans()),
        slices=(*slices, s - sum(slices)) if slices else (), window=draw(st.sampled_from([None, 1, 3, 8, 30])),
        softcap=draw(st.sampled_from([None, None, 0.4])), sinks=draw(st.booleans()),
    )


@settings(max_examples=14, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(cases())
def test_any_spread_attention_is_plain_attention(pool: Pool, case: Case) -> None:
    for found in pool.run(errors, case.layout.cp, case):
        assert max(found) < 1e-10


@pytest.mark.parametrize(("ulysses", "documents", "kernel"), [
    (1, False, "sdpa"), (1, True, "explicit"), (2, False, "explicit"), (2, True, "sdpa"),
])
def test_chunks_longer_than_a_block_of_rows(pool: Pool, ulysses: int, documents: bool, kernel: str) -> None:
    """Of which some hold no document's end, and some lie in two documents that a block of rows has none of."""
    case = Case(Layout(cp=2, ulysses=ulysses), b=1, s=2200, a=2, k=2, d=4, documents=documents, kernel=kernel)
    for found in pool.run(errors, 2, case):
        assert max(found) < 1e-10


@pytest.mark.parametrize(("order", "window"), [
    ("zig-zag", None), ("zig-zag", 9), ("striped", 9), ("contiguous", None),
])
@pytest.mark.parametrize(("cp", "ulysses", "b"), [(2, 1, 2), (3, 1, 1), (4, 2, 2), (2, 2, 2)])
def test_documents_as_lengths(pool: Pool, cp: int, ulysses: int, b: int, window: int | None, order: str) -> None:
    case = Case(
        Layout(cp=cp, ulysses=ulysses, cp_order=order), b=b, s=47, a=4, k=2, d=4, documents=True, lengths=True,
        window=window,
    )  # fmt: skip
    for found in pool.run(errors, cp, case):
        assert max(found) < 1e-10


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
@pytest.mark.parametrize("kernel", ["sdpa", "explicit"])
def test_in_other_precisions_it_is_plain_up_to_rounding(
    pool: Pool, kernel: str, dtype: torch.dtype, allowed: float
) -> None:
    case = Case(Layout(cp=4), b=2, s=64, a=4, k=2, d=8, documents=True, kernel=kernel, dtype=dtype)
    found = pool.run(errors, 4, case)
    assert 1e-10 < max(map(max, found)) < allowed


def kept(case: Case) -> tuple[int, int]:
    """Bytes that attention keeps for backward on this rank, and in plain attention."""
    (q, k, v, _), documents = inputs(case)
    at, core = here(case), AttentionCore()
    mine = token_positions(at.tokens.chunks(at.rank), q.device)
    own = [x[:, :, mine].detach().requires_grad_() for x in (q, k, v)]
    sizes = []
    for attend in (
        lambda: ContextAttention(at, AttentionCore(case.kernel))(*own, ContextMask(at)(0, len(mine), documents, q)),
        lambda: core(*(x.requires_grad_() for x in (q, k, v)), None),
    ):
        found = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, found=found: found.setdefault(x.data_ptr(), x), lambda x: x
        ):
            attend()
        sizes.append(sum(x.numel() * x.element_size() for x in found.values()))
    return sizes[0], sizes[1]


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(("cp", "ulysses"), [(2, 1), (2, 2), (4, 1), (4, 2), (8, 1)])
def test_what_attention_keeps_falls_as_1_over_cp(pool: Pool, cp: int, ulysses: int, documents: bool) -> None:
    """q, k, v, the output and its log-sum-exp of a rank's own tokens; also where documents would need a mask."""
    case = Case(Layout(cp=cp, ulysses=ulysses), b=2, s=64, a=4, k=2, d=8, documents=documents)
    for mine, whole in pool.run(kept, cp, case):
        assert mine * cp == whole
