"""Ranks of `shoal verify --device cuda`: their exchange of tensors through host memory, and their comparison."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path


def stage() -> tuple[dict, set[str]]:
    import torch

    from shoal.engine.collectives import ops
    from shoal.engine.collectives.group import Group
    from shoal.engine.collectives.pending import DryTransport
    from shoal.engine.collectives.staged import StagedTransport
    from tests.fake_cuda.census import fake_cuda

    group = Group([4, 6], 1, shared=StagedTransport(Group([4, 6], 1, shared=DryTransport([4, 6]))))
    with fake_cuda() as recorder:
        x, full = torch.ones(8, device="cuda"), torch.ones(2, 8, device="cuda")
        made = [ops.all_reduce(x, group), ops.all_gather(x, group), ops.reduce_scatter(full, group)]
        made += ops.all_to_all([x, x], [(8,), (3,)], group)
        made.append(torch.empty(5, device="cuda"))
        for work in (ops.start_send(x, 4, group), ops.start_receive(made[-1], 4, group)):
            work.wait()
    copies = Counter()
    for line, number in recorder.census.copies.items():
        copies[line.split(" copy_ at ")[0]] += number
    return copies, {str(out.device) for out in made}


def test_staged_operations_copy_to_the_host_and_back(on_fake_cuda: Callable) -> None:
    copies, devices = on_fake_cuda(stage)
    assert devices == {"cuda:0"}
    assert copies == {
        "cuda -> cpu [8]": 4, "cuda -> cpu [16]": 1,  # what is summed, gathered and sent, and what is scattered
        "cpu -> cuda [8]": 3, "cpu -> cuda [16]": 1, "cpu -> cuda [5]": 1,
    }


def compare(folder: Path) -> tuple[set, set]:
    """Return the operations on several devices of a rank's part of a verification, and the devices in its report."""
    from dataclasses import fields

    import torch
    import torch.distributed as dist

    from shoal.engine.collectives.mesh import DryMesh
    from shoal.testing.verify import rank
    from shoal.testing.verify.case import prepare
    from shoal.testing.verify.reference import ComparisonJob, run_reference
    from shoal.training.dry_run.dry_run import DryEngine
    from tests.fake_cuda.census import fake_cuda
    from tests.testing.verify.runs import small_run

    model = {"layers": 1, "kv_heads": 4, "experts": {"count": 4, "ffn": 6, "per_token": 2}}
    run = small_run({"dp": 2, "zero": 3, "tp": 2, "sequence_parallel": True}, model, attention="explicit")
    case = prepare(run, own_precision=False, device="cuda")
    job = ComparisonJob({"adamw": case.config}, case.shape, 1, folder, trace=True)
    run_reference(job, "adamw")
    dist.get_rank = lambda: 1
    rank.pick_device = lambda *_, **__: torch.device("cuda", 0)
    rank.Mesh = lambda layout, number, device, transport: DryMesh(layout, number, device=device)
    rank.Engine = DryEngine
    with fake_cuda() as recorder:
        report = rank.compare(job)
    found = [getattr(step, field.name) for step in report.steps.values() for field in fields(step)]
    return {*recorder.census.mismatches}, {str(value.device) for value in found if isinstance(value, torch.Tensor)}


def test_a_rank_compares_on_the_host(on_fake_cuda: Callable, tmp_path: Path) -> None:
    mismatches, devices = on_fake_cuda(compare, tmp_path)
    assert not mismatches and devices == {"cpu"}
