"""Estimates of a model of one's own are what its engine holds, and what its operators compute."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.base.errors import UsageError
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.own.definition import load_own_model
from shoal.engine.own.flops import count_flops
from shoal.pipeline.from_layout import build_layout_program
from shoal.planning.auto.own_loss import with_plan
from shoal.planning.cost.time.communication import ring_group
from shoal.planning.cost.time.engine_layer import attained
from shoal.planning.own_counts import OwnCounts, count_chain, count_own_model
from shoal.planning.own_estimate import estimate_own_model
from shoal.planning.own_search import plan_own_model
from shoal.spec.catalog.calibration import cluster_calibration
from shoal.spec.config import RunConfig
from shoal.training.check import check
from shoal.training.samples import open_samples
from shoal.training.step.own_engine import OwnEngine
from tests.testing.own import plain, zoo
from tests.testing.own.test_equality import config_of


def held(config: RunConfig) -> tuple[dict[str, int], int]:
    mesh = Mesh(config.parallel, dist.get_rank())
    engine = OwnEngine(config, check(config), mesh, open_samples(config, "train"))
    engine.step(0)
    return engine.parameters.bytes(), engine.optimizer.bytes()


@pytest.mark.parametrize(("name", "layout", "precision"), [
    ("wide_llama", {"dp": 2, "tp": 2, "zero": 1}, "bf16"),
    ("nadam", {"dp": 2}, "fp32"),
    ("llama", {"dp": 2, "zero": 3}, "fp32"),
    ("gpt2", {"pp": 2, "dp": 2, "zero": 3}, "fp32"),  # both stages hold the tied embedding
    ("dense", {"tp": 2}, "bf16"),  # split by operators
])  # fmt: skip
def test_states_are_those_of_the_engine(name, layout, precision, pool, tmp_path):
    config = config_of(name, layout, train={"global_batch": 8, "precision": precision})
    config = with_plan(config, tmp_path)
    memory = estimate_own_model(config).memory
    ranks = [(b["parameters"], b["gradients"], o) for b, o in pool.run(held, config.parallel.world_size, config)]
    found = max(ranks, key=sum)
    assert found == pytest.approx([memory[kind] for kind in ("weights", "gradients", "optimizer")], rel=0.02)  # padding


def test_flops_and_saved_tensors_of_a_linear_layer_are_counted():
    own = shoal.OwnModel(lambda: nn.Linear(4, 8), lambda m, b: (m(b[0].flatten(1)[:, :4]).sum(), 1), plain.Images)
    config = config_of("unet", {})
    counts = count_own_model(own, config)
    assert (counts.parameters, counts.flops, counts.real) == (40, 2 * 2 * (2 * 4 * 8), False)  # and of the weights
    assert count_own_model(plain.odd, config).real  # it reads a value
    assert count_own_model(plain.lstm, config_of("lstm", {})).flops > 6 * 8000 * 2 * plain.LENGTH


def test_flops_of_attention_with_fewer_key_heads_are_counted():
    b, a, s, d = 2, 4, 8, 16
    x = torch.randn(b, a, s, d, requires_grad=True)
    with count_flops() as counter:
        y = F.scaled_dot_product_attention(x, x[:, :2], x[:, 2:], enable_gqa=True)
        assert counter.get_total_flops() == 2 * b * a * s * s * (d + d)
        y.sum().backward()
    assert counter.get_total_flops() == 2 * b * a * s * s * (2 * d + 5 * d)


@pytest.mark.parametrize("layout", [{}, {"tp": 2, "sequence_parallel": True}])
def test_counts_of_a_chain_grow_with_samples_and_add_up(layout):
    """Counts of one and of two samples give the counts of four. The counts of all stages add up to the model's."""
    one, two, four = (
        count_chain(load_own_model(config.model.module), config)
        for config in (config_of("wide_llama", layout | {"micro_batch": n}) for n in (1, 2, 4))
    )
    extended, full = one.extend(two, 4), four.full
    assert replace(extended.full, saved=full.saved, kept=full.kept) == full
    assert extended.sizes == four.sizes
    for given, counted in zip(extended.modules, four.modules, strict=True):
        assert given.saved == pytest.approx(counted.saved, rel=1e-3)  # one sample needs no tensors of indices for masks
        assert (given.sent, given.message) == (counted.sent, counted.message)
    assert full == count_own_model(zoo.wide_llama, config_of("wide_llama", layout | {"micro_batch": 4}))
    stages = four.assign(build_layout_program(shoal.Layout(pp=2), 4))
    for name in ("parameters", "flops", "saved", "sent", "forward_flops"):
        assert sum(getattr(each, name) for each in stages) == pytest.approx(getattr(four.full, name), rel=1e-6), name
    assert stages[0].message == 0 < stages[1].message
    if layout.get("sequence_parallel"):
        unsplit = count_own_model(zoo.wide_llama, config_of("wide_llama", {"tp": 2, "micro_batch": 4}))
        hidden = 4 * 4 * plain.LENGTH * 32  # bytes in float32
        assert unsplit.saved - full.saved >= 2 * 5 * hidden // 2  # of each layer: two norms, what they return, two sums
        assert full.sent - unsplit.sent == 2 * 2 * hidden // 2  # backward gathers the inputs of two regions again
    with pytest.raises(UsageError, match=r"its pipeline has 2 modules, and the layout 3 stages"):
        four.assign(build_layout_program(shoal.Layout(pp=3), 4))


def test_modules_of_a_chain_have_their_own_backward():
    """The first has no gradient of its input, a frozen one none of its weight; attention has 5 products after 2. One
    that returns its input has none, and leaves those around it theirs."""
    class Chain(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(16, 16), Attend(), nn.Linear(16, 64), nn.Identity(),
                             nn.Linear(64, 16).requires_grad_(False))

    class Attend(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x)

    own = shoal.OwnModel(Chain, lambda m, b: (m(b[0]).sum(), 1), plain.Images, pipeline=("",))
    config = config_of("unet", {"micro_batch": 1})
    counts = count_chain(own, config)
    product = 2 * 3 * 16 * 16 * 16  # of 3 heads of 16 tokens
    assert [each.forward_flops for each in counts.modules] == [product, 2 * product, 4 * product, 0, 4 * product]
    assert [each.flops for each in counts.modules] == [2 * product, 7 * product, 12 * product, 0, 8 * product]
    assert [each.weight_flops for each in counts.modules] == [product, 0, 4 * product, 0, 0]
    assert counts.full.flops == sum(each.flops for each in counts.modules)


@pytest.mark.parametrize(("pp", "passes", "kept"), [(2, 4, 2), (4, 8, 3)])
def test_a_pipeline_of_equal_modules_waits_as_its_schedule_says(pp, passes, kept):
    """1F1B idles for (p - 1) of m micro-batches. Of p = 4 ranks of a layer each, the second keeps 3 inputs; the first
    has 4 of one number for each sample. Of 2 ranks, the second keeps 2 for its two layers."""
    run = shoal.Run(
        model=lambda: nn.Sequential(*(nn.Linear(20_000, 20_000, bias=False) for _ in range(4))), pipeline=("",),
        loss=lambda m, b: (m(b[0].sum((1, 2, 3)).view(-1, 1).expand(-1, 20_000)).sum(), 1), data=plain.Images,
        layout=shoal.Layout(pp=pp, micro_batch=64, schedule="1f1b"), global_batch=64 * passes,
    )  # fmt: skip
    found, alone = run.estimate(), run.estimate(shoal.Layout(micro_batch=64))
    assert found.compute == pytest.approx(alone.compute * 12 / pp / 11)  # but the first has no gradient of its input
    assert found.pipeline == pytest.approx(found.compute * (pp - 1) / passes, rel=0.2)
    assert found.counts.parameters == 4 // pp * 20_000**2
    assert found.memory["activations"] == pytest.approx(kept * 64 * 20_000 * 4, rel=1e-3)
    again = run.estimate(run.config.parallel.model_copy(update={"recompute": "full"}))
    assert again.compute == pytest.approx(found.compute * 4 / 3)  # a forward beside 3 products
    split = run.estimate(run.config.parallel.model_copy(update={"schedule": "zb-h1"}))
    forwards, backwards = 4 // pp * (pp - 1), 2 * 4 // pp * (pp - 1) - 1  # products that the last rank waits for
    assert split.compute == found.compute
    assert split.pipeline == pytest.approx(found.pipeline * forwards / (forwards + backwards), rel=0.2)
    assert again.memory["activations"] == pytest.approx((kept + 1) * 64 * 20_000 * 4, rel=1e-3)  # one as it is rebuilt


@pytest.mark.parametrize(("pp", "dp", "cluster"), [
    (2, 1, "2x2xH100-IB100"), (2, 2, "1x4xH100-IB100"), (2, 2, "2x2xH100-IB100"), (4, 1, "2x2xH100-IB100"),
])  # fmt: skip
def test_a_micro_batch_waits_for_the_messages_between_stages(pp, dp, cluster):
    """Within a node, or between nodes if any two stages are not on one."""
    run = shoal.Run(
        model=lambda: nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(pp))), pipeline=("",),
        loss=lambda m, b: (m(b[0].sum((1, 2, 3)).view(-1, 1).expand(-1, 4096)).sum(), 1), data=plain.Images,
        layout=shoal.Layout(dp=dp, pp=pp, micro_batch=64, schedule="1f1b"), global_batch=64 * dp,
    )  # fmt: skip
    found = run.estimate(cluster=cluster)
    link, hop = ring_group(attained(found.cluster), pp, dp), cluster_calibration(found.cluster).numbers["hop"]
    message = 64 * 4096 * 4 / link.hop + link.hop_latency + hop
    first = found.compute * 2 / 3  # without the gradient of its input
    others = (pp - 2) * found.compute + first + 2 * (pp - 1) * message
    assert found.pipeline == pytest.approx(others, rel=1e-3)


class Attention(nn.Module):
    """Attention of the rows of an image, with a norm and a buffer that backward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)
        self.register_buffer("scale", torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:  # [b, 3, 16, 16], as 3 heads of 16 tokens
        q = self.project(x)
        return self.norm(F.scaled_dot_product_attention(q, q, q)) * self.scale


def test_attention_and_norms_are_counted_as_the_engine_computes_them():
    own = shoal.OwnModel(Attention, lambda m, b: (m(b[0]).sum(), 1), plain.Images)
    counts = count_own_model(own, config_of("unet", {}, train={"global_batch": 8, "precision": "bf16"}))
    rows = 2 * 3 * 16
    product, attention = 2 * rows * 16 * 16, 2 * rows * 16 * 16
    assert counts.flops == 2 * product + 7 * attention  # of the input no gradient; 2 products and 5 in the backward
    tensors = rows * 16 * (2 + 2 + 2 + 4)  # the input, q, the output of attention; the norm's input in float32
    statistics = rows * 4 + rows * (4 + 4) + 2 * 16 * 4  # of the softmax; of the norm, and its parameters in float32
    assert counts.saved == tensors + statistics  # the buffer is no activation
    assert counts.frozen == 16 * 4


@pytest.mark.parametrize(("loss", "says"), [
    (lambda m, b: (m(b[0][:, :2]).sum(), 1), "its loss.. fails in down.0, a Conv2d: RuntimeError"),
    (lambda m, b: (m(b[0]).sum() * b[0].sum().item(), 1), ""),
    (lambda m, b: (m(b[0]).sum() * float(b[0].numpy().sum()), 1), ""),
])  # fmt: skip
def test_only_a_loss_that_reads_values_is_run_with_them(loss, says):
    built = []
    own = shoal.OwnModel(lambda: built.append(1) or plain.UNet(), loss, plain.Images)
    if says:
        with pytest.raises(UsageError, match=says):
            count_own_model(own, config_of("unet", {}))
    else:
        assert count_own_model(own, config_of("unet", {})).real
    assert len(built) == (1 if says else 2)


def test_zero_pays_for_its_reductions_and_shards():
    def price(zero: int, **layout: int) -> float:
        config = config_of("llama", {"dp": 8, "zero": zero, "micro_batch": 1, **layout}, train={"global_batch": 32})
        return estimate_own_model(config, "8x1xH100-IB400", counts).data_parallel

    counts = OwnCounts(10**9, 10**9, 0, 10**9, 0, 0)
    assert price(2) > 2 * price(1)  # it reduces in each of 4 micro-batches
    assert price(3, reshard_after_forward=False) < price(3)
    assert price(3, zero_shard=2) < price(3)


@pytest.mark.parametrize(("layout", "sections", "says"), [
    ({}, {"train": {"precision": "fp8"}}, "train.precision = 'fp8' with model.module"),
    ({}, {"optimizer": {"name": "sophia-g"}}, "optimizer.name = 'sophia-g' with model.module"),
    ({"dp": 2, "zero": 1, "offload": "optimizer"}, {}, "parallel.offload = 'optimizer': estimates .* do not count it"),
])  # fmt: skip
def test_what_training_refuses_is_not_estimated(layout, sections, says):
    with pytest.raises(UsageError, match=says):
        estimate_own_model(config_of("lstm", layout, **sections))


def large_run(side: int, **arguments: object) -> shoal.Run:
    return shoal.Run(
        model=lambda: nn.Linear(side, side), loss=lambda m, b: (m(b[0].sum((1, 2, 3)).expand(side)).sum(), 1),
        data=plain.Images, **arguments,
    )  # fmt: skip


def test_the_fastest_layout_that_fits_is_planned():
    found = [each.config.parallel for each in plan_own_model(config_of("wide_llama", {}), "4xH100").fitting]
    assert {layout.tp for layout in found} == {1, 2}  # tp 4 does not divide its heads
    assert all(layout.world_size == 4 for layout in found)
    assert (found[0].dp, found[0].zero) == (4, 0)  # nothing else is needed
    planned = large_run(100_000, layout="auto", cluster="8xH100", global_batch=8).config.parallel
    assert (planned.dp, planned.zero) == (8, 2)  # 40 GB of weights, and as much of gradients
    with pytest.raises(UsageError, match=r"no layout on 8 x h100-sxm fits; the nearest, dp 8 .ZeRO-2.*221 GB"):
        large_run(200_000, layout="auto", cluster="8xH100", global_batch=8)
    with pytest.raises(UsageError, match=r"layout 'auto' needs cluster"):
        large_run(4, layout="auto")


@pytest.mark.parametrize("reads", [False, True])
def test_a_model_without_a_table_is_split_by_operators_or_it_is_said_why_not(reads, capsys):
    """With few samples and many weights, activations are smaller than gradients, so Megatron's split sends less than
    data parallelism. A loss that reads a value cannot be split by operators: the modules become stages instead."""

    def loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        return model(batch).square().sum() * (batch[0, 0].item() if reads else 1), len(batch)

    run = shoal.Run(
        lambda: nn.Sequential(nn.Linear(64, 131072), nn.GELU(), nn.Linear(131072, 64)), loss, torch.ones(8, 64),
        layout="auto", cluster="2xA100", global_batch=2,
    )  # fmt: skip
    said = capsys.readouterr().out
    if reads:
        assert (run.config.parallel.pp, run.own.pipeline, run.own.tensor_parallel) == (2, "auto", None)
        assert "layout auto: pp 2 (1f1b), micro_batch 1: at least" in said
        assert "operators are not split: Sequential: its forward pass reads the value of a tensor" in said
    else:
        assert run.own.tensor_parallel.kept() == {
            "0.weight": "[Ax, B]", "0.bias": "[Ax]", "2.weight": "[A, Bx]", "2.bias": "[A]",
        }  # fmt: skip
        assert "layout auto: tp 2, micro_batch 2, 3 of 4 weights split by operators: at least" in said
        assert run.estimate().step_seconds < run.estimate(shoal.Layout(dp=2, micro_batch=1)).step_seconds


def test_a_model_that_is_too_large_is_said_without_being_built():
    run = large_run(200_000, global_batch=9)
    found = run.estimate()
    assert [large_run(4, cluster="4xH100").estimate(cluster=name).cluster.size for name in (None, "8xH100")] == [4, 8]
    assert not found.fits and any("does not fit" in line for line in found.lines())
    with pytest.raises(UsageError, match=r"dp 9 .* needs 9 accelerators, and 8 x h100"):
        run.estimate(shoal.Layout(dp=9))
    with pytest.raises(UsageError, match=r"train.global_batch = 9 is no multiple of dp 2 x micro_batch 1"):
        run.estimate(shoal.Layout(dp=2))
    with pytest.raises(UsageError, match=r"count parallel.dp, tp and pp"):
        run.estimate(shoal.Layout(cp=2))


def test_small_sums_take_the_time_to_launch_them_and_to_wait():
    """Collectives take as long to launch, and wait as long, as in an estimate of a model of the catalog."""
    found = estimate_own_model(config_of("wide_llama", {"tp": 2, "micro_batch": 4}), "8xH100")
    constants = cluster_calibration(found.cluster).numbers
    least = constants["collective_launch"] + constants["wait"] * 1  # log2 of 2 ranks
    counts = count_own_model(zoo.wide_llama, config_of("wide_llama", {"tp": 2, "micro_batch": 4}))
    assert counts.sums == 2 * 4 + 2  # two in each layer, forward and backward; beside them the embedding and the head
    passes = found.config.parallel.microbatches(found.config.train.global_batch)
    assert found.tensor_parallel == pytest.approx(passes * counts.sums * least, rel=0.3)  # bytes take little
    replicas = estimate_own_model(config_of("wide_llama", {"dp": 4}), "8xH100")
    assert replicas.data_parallel > constants["collective_launch"] + constants["wait"] * 2
