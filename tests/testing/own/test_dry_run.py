"""A dry rank of a module of one's own does what a rank does: FLOPs and transfers to the last, memory within 2 %."""

import re

import pytest
import torch.distributed as dist

import shoal
from shoal.base.errors import UsageError
from shoal.cli.main import main
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.own.definition import load_own_model
from shoal.spec.catalog import ModelShape
from shoal.spec.config import RunConfig, save_config
from shoal.training.check import check
from shoal.training.dry_run.dry_run import Counted, count, dry_run, make_samples
from shoal.training.dry_run.tracker import Tracker
from shoal.training.step.own_engine import OwnEngine
from tests.testing.own.test_equality import config_of


def real(config: RunConfig, shape: ModelShape, steps: int, chosen: set[int]) -> Counted | None:
    """What this rank of a world that is there does; nothing of a rank that is not chosen: to look on takes longer."""
    mesh = Mesh(config.parallel, dist.get_rank(), transport="backend")
    if mesh.rank not in chosen:
        engine = OwnEngine(config, shape, mesh, make_samples(config, shape))
        for step in range(steps):
            engine.step(step)
        return None
    with Tracker() as tracker:
        return count(OwnEngine(config, shape, mesh, make_samples(config, shape)), tracker, steps)


@pytest.mark.parametrize(("name", "layout", "sections"), [
    ("gpt2", {"dp": 4, "zero": 3, "zero_shard": 2}, {}),  # with dropout
    ("wide_llama", {"dp": 2, "tp": 2, "zero": 1}, {"optimizer": {"name": "muon"}}),
    ("split_bert", {"tp": 2, "pp": 2, "sequence_parallel": True, "recompute": "full"}, {}),
    ("t5", {"pp": 2, "dp": 2, "zero": 3, "schedule": "interleaved-1f1b", "virtual_stages": 2}, {}),
    ("vit", {"dp": 2, "zero": 2}, {"optimizer": {"name": "sgd"}}),  # whose initial values are drawn until they fit
    ("lstm", {"dp": 2}, {}),
    ("deep_unet", {"pp": 2, "schedule": "zb-v"}, {}),
])  # fmt: skip
def test_a_dry_rank_does_what_a_rank_does(pool, name, layout, sections):
    config = config_of(name, layout, **sections)
    shape, world = check(config), config.parallel.world_size
    # Of the last stage, whose last rank has the padding; in one case also of the first.
    chosen = {0, world - 1} if name == "t5" else {world - 1}
    dry = {rank: dry_run(config, shape, rank, steps=2, on_cpu=True) for rank in chosen}
    # Threads of gloo free a tensor with a delay (on a busy machine in three steps of ten, at random): compare with the
    # least of the steps, without sent activations, and take more if those were late.
    peaks: dict[int, list[int]] = {rank: [] for rank in chosen}
    for _ in range(5):
        ranks = pool.run(real, world, config, shape, 3, chosen)
        for rank, seen in peaks.items():
            seen += [step.peak for step in ranks[rank].steps[1:]]
        least = {rank: min(peaks[rank]) - messages(here) for rank, here in dry.items()}
        if all(least[rank] <= 1.02 * here.steps[-1].peak for rank, here in dry.items()):
            break
    for rank, here in dry.items():
        there, ours = ranks[rank], here.steps[-1]
        assert (here.where, here.parameters, here.held) == (there.where, there.parameters, there.held)
        theirs = there.steps[-1]
        assert (ours.flops, ours.sent, ours.calls) == (theirs.flops, theirs.sent, theirs.calls)
        # The workspace of oneDNN's recurrent layers is known only with values.
        assert name == "lstm" or least[rank] <= 1.02 * ours.peak <= 1.04 * (least[rank] + messages(here))


def messages(counted: Counted) -> int:
    return sum(size for (axis, _), size in counted.steps[-1].sent.items() if axis.startswith("pp"))


def test_a_forward_that_reads_values_is_refused():
    config = config_of("wide_qwen3_moe", {"dp": 2, "ep": 2})
    with pytest.raises(UsageError, match=r"fails in model.layers.0.mlp.experts, .* a dry run has no values"):
        dry_run(config, check(config), 0)


def test_the_command_and_the_run_count_the_same(tmp_path, capsys):
    config = config_of("wide_llama", {"dp": 8, "tp": 2, "zero": 1}, train={"global_batch": 32})
    file = tmp_path / "run.toml"
    save_config(config, file)
    assert main(["estimate", str(file), "--cluster", "2x8xH100-IB400", "--dry-run", "--rank", "9", "--steps", "1"]) == 0
    shown = capsys.readouterr().out
    own = load_own_model(config.model.module)
    run = shoal.Run(own.model, own.loss, own.data, layout=config.parallel, global_batch=32)
    found = run.dry_run(rank=9, steps=1, cluster="2x8xH100-IB400")
    assert shown.splitlines()[1:] == [*found.lines()][1:]
    assert re.search(r"peak of memory +\S+ kB \(\S+ kB\)", shown) and re.search(r"tp +all-reduce", shown)
    assert main(["estimate", str(file), "--cluster", "2x8xH100-IB400", "--dry-run", "--rank", "16"]) == 2
    assert "ranks are 0 to 15" in capsys.readouterr().err
    assert main(["estimate", str(file), "--dry-run", "--json"]) == 2
