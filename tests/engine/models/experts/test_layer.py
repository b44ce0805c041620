"""The layer against its definition: every token through every expert, weighed by what the gate gives it."""

import pytest
import torch
import torch.nn.functional as F

from shoal.engine.models.experts import permutation as permutations
from shoal.engine.models.experts.gates import most_choices
from shoal.engine.models.experts.grouped import GroupedBias, GroupedFunction
from shoal.engine.models.experts.layer import MoE
from shoal.engine.models.experts.router import SUMS, RoutingContext
from shoal.spec.catalog import Experts, ModelShape, model_shape

GATES = {"top-k": 2, "switch": 1, "gshard": 2, "noisy-top-k": 2, "expert-choice": 2}


def shape_of(family: str = "tiny", activation: str | None = None, **experts) -> ModelShape:
    given = {"count": 4, "per_token": 2, "ffn": 5, **experts}
    return model_shape(family).model_copy(
        update={"hidden": 6, "activation": activation, "experts": Experts(**given)}
    )


def layer_of(shape: ModelShape) -> MoE:
    torch.manual_seed(0)
    layer = MoE(shape, 0).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


def naive(layer: MoE, x: torch.Tensor, context: RoutingContext) -> torch.Tensor:
    """Dense: all experts for all tokens."""
    weights, _ = layer.router(x, context)
    held, outputs = layer.experts, []
    biased = held.up_bias is not None
    for e in range(weights.shape[-1]):
        up = F.linear(x, held.up[e], held.up_bias[e] if biased else None)
        if held.gate is None:
            inside = F.gelu(up, approximate="tanh")
        else:
            gate = F.linear(x, held.gate[e], held.gate_bias[e] if biased else None)
            inside = _clamped(gate, up) if held.clamped else F.silu(gate) * up
        outputs.append(F.linear(inside, held.down[e], layer.down_bias[e] if biased else None))
    y = (torch.stack(outputs, 2) * weights.unsqueeze(-1)).sum(2)
    return y if layer.shared is None else y + layer.shared(x)


def _clamped(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The gate of gpt-oss, from its config: swiglu_limit 7, alpha 1.702."""
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


@pytest.mark.parametrize(("family", "activation"), [("tiny", "clamped"), ("tiny", None), ("tiny-gpt", None)])
def test_biases_and_clamped_gates_are_as_written_out(family: str, activation: str | None) -> None:
    layer = layer_of(shape_of(family, activation, biases=True, shared=1, capacity_factor=0.7))
    x = 4 * torch.randn(2, 9, 6, dtype=torch.float64, requires_grad=True)
    wanted, gradient = [x, *layer.parameters()], torch.randn(2, 9, 6, dtype=torch.float64)
    found, expected = layer(x, RoutingContext()), naive(layer, x, RoutingContext())
    torch.testing.assert_close(found, expected)
    for mine, theirs in zip(
        torch.autograd.grad(found, wanted, gradient), torch.autograd.grad(expected, wanted, gradient), strict=True
    ):
        torch.testing.assert_close(mine, theirs)
    if activation is not None:
        up = layer.experts.product(x.detach().flatten(0, 1), layer.experts.up, [18, 0, 0, 0])
        assert 0 < (up.abs() > 7).sum() < up.numel()


def test_biases_of_rows_whose_ends_are_on_the_device() -> None:
    """Ends on the device give the same result as row counts on the host; rows after the last end add no gradient."""
    bias, y = torch.randn(4, 5).bfloat16(), torch.randn(9, 5).bfloat16()
    ends = torch.tensor([2, 2, 6, 7], dtype=torch.int32)
    found, expected = (GroupedBias.apply(y.clone(), bias, groups, None) for groups in (ends, [2, 0, 4, 1]))
    torch.testing.assert_close(found[:7], expected[:7])


@pytest.mark.parametrize("family", ["tiny", "tiny-gpt"])
@pytest.mark.parametrize("gate", GATES)
def test_output_and_gradients_are_those_of_the_sum_over_experts(gate: str, family: str) -> None:
    factor = 0.0 if gate == "noisy-top-k" else 0.7
    shape = shape_of(
        family, gate=gate, per_token=GATES[gate], shared=1, capacity_factor=factor, balance_loss=0.3, z_loss=0.2,
    )
    layer = layer_of(shape)
    x = torch.randn(2, 9, 6, dtype=torch.float64, requires_grad=True)
    context = RoutingContext(sequences=2, samples=torch.tensor([3, 8]))
    wanted = [x, *layer.parameters()]
    gradient = torch.randn(2, 9, 6, dtype=torch.float64)
    found, expected = layer(x, context), naive(layer, x, context)
    torch.testing.assert_close(found, expected)
    for mine, theirs in zip(
        torch.autograd.grad(found, wanted, gradient), torch.autograd.grad(expected, wanted, gradient), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


def test_backward_adds_the_gradients_of_the_losses() -> None:
    """As if balance and z loss, as a mean over sequences, had been added to the loss."""
    shape = shape_of(balance_loss=0.3, z_loss=0.2)
    layer, plain = layer_of(shape), layer_of(shape_of())
    x = torch.randn(2, 9, 6, dtype=torch.float64)
    context = RoutingContext(sequences=5)
    layer(x, context).sum().backward()
    plain(x, context).sum().backward()
    logits = F.linear(x, plain.router.weight)
    shares = logits.softmax(-1)
    part = plain.router(x, context)[1].double().mean(1) / 2
    loss = 0.3 * 4 * (part * shares.mean(1)).sum() + 0.2 * logits.logsumexp(-1).square().mean(1).sum()
    (loss / 5).backward()
    torch.testing.assert_close(layer.router.weight.grad, plain.router.weight.grad)


def test_draws_depend_on_seed_sample_and_place_alone() -> None:
    shape = shape_of(gate="gshard", balance_loss=0.0)
    layer = layer_of(shape)
    x = torch.randn(1, 9, 6, dtype=torch.float64)
    both = layer.router(x.repeat(2, 1, 1), RoutingContext(seed=1, samples=torch.tensor([7, 4])))[1]
    alone = layer.router(x, RoutingContext(seed=1, samples=torch.tensor([4])))[1]
    assert torch.equal(both[1], alone[0])
    assert not torch.equal(both[0], both[1])
    assert layer.router(x, RoutingContext())[1].sum() == 18  # validation always takes both


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_scores_are_made_in_float32_at_least(dtype: torch.dtype) -> None:
    layer = layer_of(shape_of()).to(dtype)
    seen = []
    layer.router.places.gather = lambda logits: seen.append(logits.dtype) or logits
    layer(torch.randn(1, 4, 6).to(dtype), RoutingContext())
    assert seen == [torch.float64 if dtype == torch.float64 else torch.float32]


def test_dropped_tokens_are_counted_once_by_backward_or_by_validation() -> None:
    layer = layer_of(shape_of(gate="switch", per_token=1, capacity_factor=0.5))
    x = torch.randn(3, 8, 6, dtype=torch.float64, requires_grad=True)
    layer.router.reset_tally()
    with torch.no_grad():
        layer(x, RoutingContext())
    assert not layer.router.tally.any()
    layer.router.begin_validation()
    with torch.no_grad():
        layer(x, RoutingContext())
    assert not layer.router.tally.any()
    layer(x, RoutingContext()).sum().backward()
    _, chosen = layer.router(x, RoutingContext())
    assert layer.router.tally[SUMS:].tolist() == chosen.sum((0, 1)).tolist()
    assert layer.router.tally[0] == 3 * 8 - chosen.sum() > 0
    torch.testing.assert_close(layer.router.validated, layer.router.tally)
    assert layer.router.tally[SUMS:].max() <= 3 * 1  # ceil(0.5 x 8 / 4) of each sequence


def test_the_bias_moves_towards_the_mean() -> None:
    layer = layer_of(shape_of(bias_update=0.25))
    layer.router.rebalance(torch.tensor([5.0, 1.0, 2.0, 0.0]))
    assert layer.router.bias.tolist() == [-0.25, 0.25, 0.0, 0.25]


def test_no_gate_chooses_more_than_its_bounds() -> None:
    """The device has as many rows; a capacity only lowers their number."""
    for gate, k in GATES.items():
        layer = layer_of(shape_of(gate=gate, per_token=k))
        logits = torch.randn(3, 12, 8 if gate == "noisy-top-k" else 4, dtype=torch.float64)
        chosen = layer.router._choose(logits, RoutingContext())[0].chosen
        for part in (12, 5):
            most, of_token = most_choices(layer.router.experts, 3, part, 12)
            assert chosen[:, :part].sum() <= most and chosen[:, :part].sum(-1).max() <= of_token
        assert chosen.sum() == most_choices(layer.router.experts, 3, 12, 12)[0]


@pytest.mark.parametrize("gate", GATES)
def test_device_and_host_permute_equally(gate: str) -> None:
    """The layer with the permutation of devices, in place of the host's; unused rows exist with a capacity."""
    shape = shape_of(gate=gate, per_token=GATES[gate], shared=1, capacity_factor=0.0 if gate == "noisy-top-k" else 0.7)
    layer, x = layer_of(shape), torch.randn(2, 9, 6, dtype=torch.float64, requires_grad=True)
    wanted, gradient = [x, *layer.parameters()], torch.randn(2, 9, 6, dtype=torch.float64)
    results = []
    for permutation in (permutations.permute, lambda chosen, x, most: permutations.DevicePermutation(chosen, *most)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("shoal.engine.models.experts.layer.permute", permutation)
            y = layer(x, RoutingContext(sequences=2, samples=torch.tensor([3, 8])))
            results.append([y.detach(), *torch.autograd.grad(y, wanted, gradient)])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("counts", [[3, 0, 4], [0, 0, 7], [7, 0, 0], [0, 0, 0]])
def test_runs_of_any_length(counts: list[int]) -> None:
    """Empty ones too: their matrix gets a gradient of zeros."""
    x = torch.randn(sum(counts), 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 5, 4, dtype=torch.float64, requires_grad=True)
    expected = torch.cat([part @ w.T for part, w in zip(x.split(counts), weight, strict=True)])
    gradient = torch.randn_like(expected)
    found = GroupedFunction.apply(x, weight, counts, None)
    torch.testing.assert_close(found, expected)
    for mine, theirs in zip(
        torch.autograd.grad(found, (x, weight), gradient), torch.autograd.grad(expected, (x, weight), gradient),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("counts", [[3, 0, 4], [0, 0, 7], [7, 0, 0], [0, 0, 0]])
@pytest.mark.parametrize("unused", [0, 5])
def test_one_grouped_product_of_ends_on_a_device(counts: list[int], unused: int) -> None:
    """By torch's fallback for the CPU. Rows after the last end are NaN and reach nothing."""
    m = sum(counts)
    x = torch.randn(m + unused, 8)
    x[m:] = torch.nan
    weight = torch.randn(3, 12, 8)
    ends = torch.tensor(counts).cumsum(0, dtype=torch.int32)
    gradient = torch.randn(m + unused, 12)
    gradient[m:] = torch.nan
    results = []
    for groups in (ends, counts):
        rows = m + unused if groups is ends else m
        mine, matrices, sums = x[:rows].clone().requires_grad_(), weight.clone().requires_grad_(), torch.ones(3, 12, 8)
        y = GroupedFunction.apply(mine, matrices, groups, None)
        y.backward(gradient[:rows])
        GroupedFunction.apply(mine, matrices, groups, lambda term: term(sums, False)).backward(gradient[:rows])  # noqa: B023
        results.append([y[:m].detach(), mine.grad[:m], matrices.grad, sums])
    torch.testing.assert_close(*results)
    assert all(torch.isfinite(part).all() for part in results[0])
