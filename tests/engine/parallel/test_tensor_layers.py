"""Each split layer against the whole one: outputs, gradients of inputs, gradients of parameters."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.engine.collectives.mesh import Mesh
from shoal.engine.collectives.ops import all_reduce
from shoal.engine.models.attention import Context, rotary_table
from shoal.engine.models.loss import IGNORE
from shoal.engine.models.transformer import Transformer
from shoal.engine.parallel.placement import ParamPlacement
from shoal.engine.parallel.tensor import TENSOR_PARALLEL, TENSOR_PARALLEL_2D, apply_tensor_parallel, matches
from shoal.launch.worker_pool import Pool
from shoal.spec.catalog import ModelShape
from shoal.spec.layout import Layout

LLAMA = ModelShape(
    family="llama", layers=1, hidden=10, heads=8, kv_heads=2, head_dim=4, ffn=12, vocab=61, max_sequence=8, tied=False
)
WIDE = LLAMA.model_copy(update={"hidden": 12, "ffn": 16, "kv_heads": 8})
GPT = LLAMA.model_copy(update={"family": "gpt", "kv_heads": 8})


def load(model: nn.Module, splits: dict[str, ParamPlacement], whole: nn.Module) -> None:
    """Give each rank its part of the whole model's values; padding gets values that must not matter."""
    values = dict(whole.named_parameters())
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.fill_(100.0)
            box = splits[name].box
            p[tuple(slice(n) for n in box.shape)] = values[name][box.slices]


def errors(shape: ModelShape, layout: Layout, overlap: bool) -> dict[str, float]:
    """On one rank: the largest difference of everything that each layer gives, by layer."""
    mesh = Mesh(layout, dist.get_rank())
    torch.manual_seed(0)
    whole = Transformer(shape).double()
    with torch.no_grad():
        for p in whole.parameters():
            p.normal_(std=0.3)
    split = copy.deepcopy(whole)
    splits = apply_tensor_parallel(split, shape, mesh, overlap=overlap)
    load(split, splits, whole)
    tokens, targets = torch.randint(0, shape.vocab, (2, 3, 8))
    targets[0, :5] = IGNORE
    positions = torch.arange(tokens.shape[1])
    llama = shape.family == "llama"
    context = Context(rotary_table(positions, shape.head_dim, shape.rope_theta, torch.float64) if llama else None, None)
    x = torch.randn(3, 8, shape.hidden, dtype=torch.float64)
    layers = {
        "embed": lambda model, x: model.embed(tokens, torch.arange(tokens.shape[1])) + x,
        "norm": lambda model, x: model.norm(x),
        "attention": lambda model, x: model.layers["0"].attention(x, context),
        "mlp": lambda model, x: model.layers["0"].mlp(x),
        "block": lambda model, x: model.layers["0"](x, context),
        "head and loss": lambda model, x: model.loss(model.head(model.norm(x)), targets),
    }

    def part(t: Tensor) -> Tensor:
        """What this rank has of activations [b, s, h]; the loss is whole."""
        if t.dim() == 0:
            return t
        t = t.chunk(layout.tp_x, 2)[mesh.index("tp") % layout.tp_x]
        return t.chunk(layout.tp_y, 1)[mesh.index("tp") // layout.tp_x] if layout.sequence_parallel else t

    found = {}
    for layer, run in layers.items():
        whole.zero_grad(), split.zero_grad()
        one, mine = x.clone().requires_grad_(), part(x).clone().requires_grad_()
        expected, got = run(whole, one), run(split, mine)
        weight = torch.randn_like(expected)
        expected.backward(weight), got.backward(part(weight))
        pairs = [(got, part(expected)), (mine.grad, part(one.grad))]
        reference = dict(whole.named_parameters())
        for name, p in split.named_parameters():
            if reference[name].grad is not None:
                gradient = p.grad.clone()
                for axis in splits[name].sum_over:
                    all_reduce(gradient, mesh.group(axis))
                box = splits[name].box
                pairs.append((gradient[tuple(slice(n) for n in box.shape)], reference[name].grad[box.slices]))
        found[layer] = max((a - b).abs().max().item() for a, b in pairs if a.numel())
    return found


@pytest.mark.parametrize("overlap", [False, True], ids=["apart", "overlap"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize(
    ("shape", "ranks"),
    [(LLAMA, 2), (GPT, 4), (LLAMA.model_copy(update={"vocab": 20}), 4)],  # two of 4 ranks have none of 20 ids
    ids=["llama", "gpt", "small vocabulary"],
)
def test_split_layers_compute_what_whole_ones_do(
    pool: Pool, shape: ModelShape, ranks: int, sequence_parallel: bool, overlap: bool
) -> None:
    layout = Layout(tp=ranks, sequence_parallel=sequence_parallel)
    for rank, found in enumerate(pool.run(errors, ranks, shape, layout, overlap)):
        for layer, error in found.items():
            assert error < 1e-12, f"{layer} on rank {rank}"


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize(
    ("shape", "ranks", "x"),
    [
        (WIDE, 4, 2), (WIDE, 8, 4), (WIDE.model_copy(update={"family": "gpt", "kv_heads": 4}), 8, 2),
        (WIDE.model_copy(update={"kv_heads": 1, "vocab": 5}), 4, 2),
    ],
    ids=["llama", "llama, 4 x 2", "gpt", "one head"],
)
def test_layers_split_over_a_grid_compute_what_whole_ones_do(
    pool: Pool, shape: ModelShape, ranks: int, x: int, sequence_parallel: bool
) -> None:
    """With key/value heads for each rank, for each along y, and fewer; ids for each rank, and fewer."""
    layout = Layout(tp=ranks, tp_x=x, sequence_parallel=sequence_parallel)
    for rank, found in enumerate(pool.run(errors, ranks, shape, layout, False)):
        for layer, error in found.items():
            assert error < 1e-12, f"{layer} on rank {rank}"


def memory(shape: ModelShape, tp_x: int) -> tuple[int, int]:
    mesh = Mesh(Layout(tp=dist.get_world_size(), tp_x=tp_x), dist.get_rank())
    with torch.device("meta"):
        model = Transformer(shape)
        whole = sum(p.numel() for name, p in model.named_parameters() if "norm" not in name)
        apply_tensor_parallel(model, shape, mesh)
    return whole, sum(p.numel() for name, p in model.named_parameters() if "norm" not in name)


@pytest.mark.parametrize("tp_x", [1, 2])
def test_every_matrix_is_held_once(pool: Pool, tp_x: int) -> None:
    shape = LLAMA.model_copy(update={"kv_heads": 4, "vocab": 128})
    for whole, here in pool.run(memory, 4, shape, tp_x):
        assert here * 4 == whole


@pytest.mark.parametrize("tied", [False, True])
def test_matrices_by_token_id_have_rows_for_aligned_products(tied: bool) -> None:
    shape = LLAMA.model_copy(update={"vocab": 50_257, "tied": tied})
    with torch.device("meta"):
        model = Transformer(shape)
    placements = apply_tensor_parallel(model, shape, Mesh(Layout(), 0))
    assert model.embed and model.head and (model.embed.token.weight is model.head.weight) == tied
    assert len(model.head.weight) == len(model.embed.token.weight) == 50_272
    assert [(name, p.local[0], p.box.shape[0]) for name, p in placements.items() if p.local != p.box.shape] == [
        (name, 50_272, 50_257) for name in ("embed.token.weight", "head.weight")[: 2 - tied]
    ]


@pytest.mark.parametrize("table", [TENSOR_PARALLEL, TENSOR_PARALLEL_2D], ids=["one dimension", "grid"])
def test_the_table_names_every_module_with_a_matrix_and_nothing_twice(table: dict) -> None:
    for shape in (LLAMA, GPT):
        with torch.device("meta"):
            modules = dict(Transformer(shape).named_modules())
        for name, module in modules.items():
            rules = [pattern for pattern in table if matches(pattern, name)]
            assert len(rules) <= 1, name
            if isinstance(module, nn.Linear | nn.Embedding):
                assert rules, name
