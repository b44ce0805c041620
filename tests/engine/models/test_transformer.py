"""Both families against the formulas written out naively, one position and one head at a time."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.engine.models.loss import IGNORE
from shoal.engine.models.transformer import Transformer, initial, initialise
from shoal.spec.catalog import Latent, ModelShape

LLAMA = ModelShape(
    family="llama", layers=2, hidden=12, heads=4, kv_heads=2, head_dim=6, ffn=10, vocab=11, max_sequence=9, tied=False
)
GPT = LLAMA.model_copy(update={"family": "gpt", "kv_heads": 4, "tied": True})
SHARED = LLAMA.model_copy(update={"tied": True, "kv_heads": 1})
LATENT = LLAMA.model_copy(
    update={"kv_heads": 4, "latent": Latent(query_rank=5, key_value_rank=7, rotary_dim=4, value_dim=3)}
)
SHAPES = {"llama": LLAMA, "gpt": GPT, "llama tied, one key head": SHARED, "latent attention": LATENT}


def random_model(shape: ModelShape, **options: Any) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(shape, **options).double()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.3)
    return model


def naive_logits(model: Transformer, tokens: Tensor, documents: Tensor | None) -> Tensor:
    """One sequence, position by position. tokens: [s]; returns [s, v]."""
    shape, w = model.shape, dict(model.named_parameters(remove_duplicate=False))
    gpt = shape.family == "gpt"

    def linear(x: Tensor, name: str) -> Tensor:
        y = w[f"{name}.weight"] @ x
        return y + w[f"{name}.bias"] if f"{name}.bias" in w else y

    def norm(x: Tensor, name: str, eps: float = shape.norm_eps) -> Tensor:
        if gpt:
            x = x - x.sum() / len(x)
        x = x / ((x * x).sum() / len(x) + eps).sqrt()
        return x * w[f"{name}.weight"] + (w[f"{name}.bias"] if gpt else 0)

    def turn(head: Tensor, position: int) -> Tensor:
        turned, half = head.clone(), len(head) // 2
        for i in range(half):  # pairs (i, i + half), as complex numbers
            angle = position * shape.rope_theta ** (-2 * i / len(head))
            z = complex(head[i], head[i + half]) * complex(math.cos(angle), math.sin(angle))
            turned[i], turned[i + half] = z.real, z.imag
        return turned

    def heads(x: Tensor, name: str, position: int) -> list[Tensor]:
        turns = not gpt and not name.endswith("v")
        return [turn(head, position) if turns else head for head in linear(x, name).split(shape.head_dim)]

    def latent_heads(x: Tensor, name: str, position: int) -> list[list[Tensor]]:
        """DeepSeek-V2, equations 37 to 47."""
        d, r, rank = shape.head_dim, shape.latent.rotary_dim, shape.latent.key_value_rank
        queries = linear(norm(linear(x, f"{name}.q_down"), f"{name}.q_latent_norm", 1e-6), f"{name}.q_up")
        narrow = linear(x, f"{name}.kv_down")
        wide = linear(norm(narrow[:rank], f"{name}.kv_latent_norm", 1e-6), f"{name}.kv_up")
        q = [torch.cat((head[:d], turn(head[d:], position))) for head in queries.split(d + r)]
        k = [torch.cat((head[:d], turn(narrow[rank:], position))) for head in wide.split(d + shape.value_dim)]
        return [q, k, [head[d:] for head in wide.split(d + shape.value_dim)]]

    def gelu(x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    xs = [w["embed.token.weight"][t] + (w["embed.position.weight"][i] if gpt else 0) for i, t in enumerate(tokens)]
    for layer in (f"layers.{i}" for i in range(shape.layers)):
        normed = [norm(x, f"{layer}.attention_norm") for x in xs]
        if shape.latent:
            made = [latent_heads(x, f"{layer}.attention", i) for i, x in enumerate(normed)]
            q, k, v = zip(*made, strict=True)
        else:
            q, k, v = ([heads(x, f"{layer}.attention.{n}", i) for i, x in enumerate(normed)] for n in "qkv")
        for i in range(len(xs)):
            mixed = []
            for head in range(shape.heads):
                group = head // (shape.heads // shape.kv_heads)
                seen = [j for j in range(i + 1) if documents is None or documents[j] == documents[i]]
                scores = torch.stack([q[i][head] @ k[j][group] / math.sqrt(shape.query_dim) for j in seen]).exp()
                mixed.append(sum(a * v[j][group] for a, j in zip(scores / scores.sum(), seen, strict=True)))
            xs[i] = xs[i] + linear(torch.cat(mixed), f"{layer}.attention.out")
        for i in range(len(xs)):
            x = norm(xs[i], f"{layer}.mlp_norm")
            if gpt:
                inner = gelu(linear(x, f"{layer}.mlp.up"))
            else:
                gate = linear(x, f"{layer}.mlp.gate")
                inner = gate / (1 + (-gate).exp()) * linear(x, f"{layer}.mlp.up")
            xs[i] = xs[i] + linear(inner, f"{layer}.mlp.down")
    return torch.stack([linear(norm(x, "norm"), "head") for x in xs])


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize("kernel", ["sdpa", "explicit"])
@torch.no_grad()
def test_logits_are_the_formulas(shape: ModelShape, packed: bool, kernel: str) -> None:
    model = random_model(shape, kernel=kernel)
    tokens = torch.randint(0, shape.vocab, (2, 7))
    documents = torch.tensor([[0, 0, 1, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1]]) if packed else None
    logits = model(tokens, documents=documents)
    for row in range(2):
        expected = naive_logits(model, tokens[row], None if documents is None else documents[row])
        torch.testing.assert_close(logits[row], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_loss_is_a_sum_over_the_targets_that_count(shape: ModelShape) -> None:
    model = random_model(shape)
    tokens, targets = torch.randint(0, shape.vocab, (2, 3, 5))
    targets[0, 1] = targets[2, 4] = targets[2, 0] = IGNORE
    log_p = model(tokens).log_softmax(-1)
    expected = -sum(log_p[b, s, targets[b, s]] for b in range(3) for s in range(5) if targets[b, s] != IGNORE)
    torch.testing.assert_close(model(tokens, targets), expected)


def test_a_batch_without_targets_has_loss_zero_and_no_gradient() -> None:
    model = random_model(LLAMA)
    loss = model(torch.zeros(1, 4, dtype=torch.int64), torch.full((1, 4), IGNORE))
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad.abs().max() == 0 for p in model.parameters())


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_parameters_are_those_that_the_shape_counts(shape: ModelShape) -> None:
    assert sum(p.numel() for p in Transformer(shape).parameters()) == shape.parameters()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@torch.no_grad()
def test_a_token_does_not_see_what_follows_it(shape: ModelShape) -> None:
    model = random_model(shape)
    tokens = torch.randint(0, shape.vocab, (1, 9))
    before = model(tokens)
    for place in range(9):
        changed = tokens.clone()
        changed[0, place] = (changed[0, place] + 1) % shape.vocab
        after = model(changed)
        assert torch.equal(after[0, :place], before[0, :place])
        assert not torch.allclose(after[0, place], before[0, place])


@torch.no_grad()
def test_a_document_is_computed_as_if_it_were_alone() -> None:
    model = random_model(LLAMA)
    tokens = torch.randint(0, LLAMA.vocab, (1, 8))
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    # Rotary positions are relative, so where a document starts does not matter.
    torch.testing.assert_close(model(tokens, documents=documents)[:, 3:], model(tokens[:, 3:]))


@torch.no_grad()
def test_stages_in_turn_are_the_whole_model() -> None:
    model = random_model(LLAMA)
    tokens, targets = torch.randint(0, LLAMA.vocab, (2, 2, 6))
    first, last = random_model(LLAMA), random_model(LLAMA)
    first.norm = first.head = None
    del first.layers["1"]
    last.embed = None
    del last.layers["0"]
    hidden = first(tokens)
    assert hidden.shape == (2, 6, LLAMA.hidden)
    torch.testing.assert_close(last(tokens, targets, hidden=hidden), model(tokens, targets), rtol=1e-12, atol=0)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_seed_gives_every_parameter_its_start(shape: ModelShape) -> None:
    starts = []
    for seed in (1, 1, 2):
        model = random_model(shape)
        initialise(model, seed)
        starts.append(dict(model.named_parameters()))
    for name, once in starts[0].items():
        mean, std = initial(name, shape)
        assert torch.equal(once, starts[1][name])
        assert torch.equal(once, starts[2][name]) == (std == 0)
        assert (once - mean).abs().max() <= 6 * std
