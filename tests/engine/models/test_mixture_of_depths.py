"""Layers that only some tokens pass through, against the paper's rule written out with masks, on one device."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.base.errors import UsageError
from shoal.engine.models.attention import Context
from shoal.engine.models.cache import Slice
from shoal.engine.models.experts.router import find_modules
from shoal.engine.models.loss import IGNORE
from shoal.engine.models.mixture_of_depths import MixtureOfDepths, choose_highest
from shoal.engine.models.transformer import Block, Transformer
from shoal.planning.cost.flops import layer_flops
from shoal.spec.catalog import Depths, ModelShape
from shoal.spec.config import build_config
from shoal.spec.layout import Recompute

S, VOCAB = 10, 31


def shape_of(**depths) -> ModelShape:
    model = {
        "name": depths.pop("name", "tiny"), "layers": 3, "hidden": 12, "heads": 2, "kv_heads": 1, "head_dim": 6,
        "ffn": 14, "vocab": 300, "depths": {"capacity": 0.4, "predictor": 3, **depths},
    }
    return build_config({"model": model}).model.shape(vocab=257, sequence_length=S).model_copy(update={"vocab": VOCAB})


def model_of(shape: ModelShape, seed: int = 0, recompute: Recompute = "none") -> Transformer:
    generator = torch.Generator().manual_seed(seed)
    model = Transformer(shape, recompute=recompute).double()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.4, generator=generator)
    return model


def tokens_of(b: int = 2, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCAB, (b, S), generator=torch.Generator().manual_seed(seed))


def past_length(part: Slice, attention: torch.nn.Module) -> int:
    """The number of earlier tokens whose keys and values are cached."""
    return part.past[attention][0].shape[2] if attention in part.past else 0


def masked(block: Block, x: torch.Tensor, context: Context) -> torch.Tensor:
    """The rule, without any token moved: all pass, but see chosen ones alone; then only chosen ones count."""
    depth = block.depth
    scores = x @ depth.router
    taken = choose_highest(scores, depth.depths.taken(x.shape[1]))
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, taken, True)
    causal = torch.ones(S, S, dtype=torch.bool).tril() if context.mask is None else context.mask
    seen = causal & chosen[:, None, None, :] | torch.eye(S, dtype=torch.bool)  # others see themselves: no row is empty
    weights = scores.sigmoid() if depth.depths.weight == "sigmoid" else scores
    return x + (weights * chosen).unsqueeze(-1) * block.residual_update(x, context._replace(mask=seen))


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("name, weight", [("tiny", "score"), ("tiny", "sigmoid"), ("tiny-gpt", "score")])
def test_chosen_tokens_pass_as_the_paper_says(name: str, weight: str, documents: bool) -> None:
    model = model_of(shape_of(name=name, weight=weight))
    tokens = tokens_of()
    targets = tokens.roll(-1, 1)
    packed = torch.tensor([[0] * 4 + [1] * 6, [0] * 7 + [1] * 3]) if documents else None
    model(tokens, targets, packed).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    for layer in model.layers.values():
        if layer.depth is not None:
            layer.forward = lambda x, context, layer=layer: masked(layer, x, context)
    loss = model(tokens, targets, packed)
    loss.backward()
    assert [i for i, layer in model.layers.items() if layer.depth is not None] == ["1"]
    for parameter, p in model.named_parameters():
        if "predictor" in parameter:
            assert p.grad is None and found[parameter].abs().max() > 0  # they learn by a loss of their own
        else:
            torch.testing.assert_close(found[parameter], p.grad, rtol=1e-9, atol=1e-12)


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=12), st.data())
def test_the_highest_are_taken_and_of_equal_ones_the_earlier(scores: list[int], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(scores)))
    noise = torch.tensor(data.draw(st.lists(st.sampled_from([0.0, 4e-16, -4e-16]), min_size=12, max_size=12)))
    taken = choose_highest(torch.tensor([scores]).double() + noise[: len(scores)], k)
    assert taken[0].tolist() == sorted(sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k])


def test_no_other_sequence_changes_what_a_sequence_computes() -> None:
    model, tokens = model_of(shape_of()), tokens_of(3)
    together = model(tokens)
    for b in range(3):
        torch.testing.assert_close(model(tokens[b : b + 1]), together[b : b + 1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_predictions_are_counted_once_and_learned(recompute: str) -> None:
    shape = shape_of(every=1)
    model, tokens = model_of(shape, recompute=recompute), tokens_of()
    entered = []
    for depth in find_modules(model, MixtureOfDepths):
        depth.reset_tally()
        depth.register_forward_pre_hook(lambda module, args: entered.append((module, args[0].detach().clone())))
    # No token's loss: all gradients are the predictors'.
    model(tokens, torch.full_like(tokens, IGNORE), sequences=5).backward()
    for depth, x in entered[: shape.layers]:
        logits = torch.nn.functional.gelu(x @ depth.predictor_up.t()) @ depth.predictor_down
        chosen = torch.zeros(2, S, dtype=torch.bool).scatter_(1, choose_highest(x @ depth.router, 4), True)
        losses = -torch.where(chosen, logits.sigmoid(), 1 - logits.sigmoid()).log()
        right, expected = (logits > 0) == chosen, logits > 0
        assert depth.tally[:3].tolist() == [right.sum(), (right & chosen).sum(), expected.sum()]
        torch.testing.assert_close(depth.tally[3], losses.mean(1).sum())
        (gradient,) = torch.autograd.grad(losses.mean(1).sum() / 5, depth.predictor_up)
        torch.testing.assert_close(depth.predictor_up.grad, gradient)
    assert all(
        not p.grad.abs().max() for name, p in model.named_parameters() if p.grad is not None and "predictor" not in name
    )


@pytest.mark.parametrize("name", ["tiny", "tiny-gpt"])
def test_slices_decide_by_the_predictor_token_by_token(name: str) -> None:
    """One token at a time is what all at once is, and what the masked rule makes of the tokens that are foreseen."""
    model, tokens = model_of(shape_of(name=name, every=1), seed=1), tokens_of(1)
    with torch.no_grad():
        at_once, seen, one_by_one = model(tokens, part=Slice()), Slice(), []
        for i in range(S):
            seen = Slice(seen)
            one_by_one.append(model(tokens[:, i : i + 1], part=seen))
        assert seen.stop == S
        torch.testing.assert_close(torch.cat(one_by_one, 1), at_once, rtol=1e-9, atol=1e-12)
        passed = [past_length(seen, layer.attention) for layer in model.layers.values()]  # of all tokens but the last
        assert any(0 < n < S - 1 for n in passed), passed
        for layer in model.layers.values():
            depth = layer.depth

            def chosen_alone(x, context, layer=layer, depth=depth):
                foreseen = torch.nn.functional.gelu(x @ depth.predictor_up.t()) @ depth.predictor_down > 0
                causal = torch.ones(S, S, dtype=torch.bool).tril()
                seen = causal & foreseen[:, None, None, :] | torch.eye(S, dtype=torch.bool)
                added = layer.residual_update(x, context._replace(mask=seen))
                return x + ((x @ depth.router) * foreseen).unsqueeze(-1) * added

            layer.forward = chosen_alone
        torch.testing.assert_close(at_once, model(tokens), rtol=1e-9, atol=1e-12)


def test_several_sequences_in_slices_are_refused() -> None:
    with pytest.raises(ValueError, match="one sequence of one document"):
        model_of(shape_of())(tokens_of(), part=Slice())


def test_no_predicted_token_skips_the_layer() -> None:
    model, tokens = model_of(shape_of()), tokens_of(1)
    for depth in find_modules(model, MixtureOfDepths):
        depth.predictor_down.data.zero_()
    before = Slice()
    model(tokens, part=before)
    after = Slice(before)
    model(tokens, part=after)
    assert after.start == S and past_length(after, model.layers["0"].attention) == S
    assert past_length(after, model.layers["1"].attention) == 0


@given(st.floats(0.01, 1.0), st.integers(0, 2), st.integers(1, 3), st.sampled_from(["tiny", "tiny-gpt"]))
def test_parameters_and_flops_are_those_of_the_model(capacity: float, first: int, every: int, name: str) -> None:
    depths = {"capacity": capacity, "first": first, "every": every}
    if first + every > 3:
        with pytest.raises(UsageError, match="none takes some tokens"):
            shape_of(name=name, **depths)
        return
    shape = shape_of(name=name, **depths)
    with torch.device("meta"):
        model = Transformer(shape)
    assert shape.parameters() == sum(p.numel() for p in set(model.parameters()))
    # Every product of a sequence, one for each matrix, and the two of attention.
    flops, width = 6 * S * shape.vocab * shape.hidden, shape.heads * shape.head_dim
    for layer in model.layers.values():
        n = S if layer.depth is None else Depths(**depths).taken(S)
        matrices = [p for name, p in layer.named_parameters() if name.endswith("weight") and p.dim() > 1]
        flops += 6 * n * sum(p.numel() for p in matrices)
        flops += 12 * n * n * width
        flops += 0 if layer.depth is None else 6 * S * sum(p.numel() for p in layer.depth.parameters())
    assert shape.flops_per_token(S) == flops // S
    of_layers = sum(layer_flops(shape, S, i).forward for i in range(shape.layers))
    assert of_layers == pytest.approx((flops / S - 6 * shape.vocab * shape.hidden) / 3, rel=0.01)


@pytest.mark.parametrize("depths, what", [({"every": 1}, "model.depths.capacity"), ({"capacity": 1.5}, "less than")])
def test_what_cannot_be_is_refused(depths: dict, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        build_config({"model": {"name": "tiny", "depths": depths}}).model.shape(vocab=257, sequence_length=S)
