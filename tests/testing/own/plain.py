"""Plain modules that shoal does not know, with their losses and samples."""

import random
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.engine.own.definition import OwnModel

VOCAB, LENGTH, CLASSES = 64, 12, 4


class Tokens:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(i)
        ids = torch.randint(0, VOCAB, (LENGTH,), generator=draw)
        return {"ids": ids, "counts": torch.rand(LENGTH, generator=draw) < 0.7}


class Images:
    def __len__(self) -> int:
        return 32

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(i)), i % CLASSES


def cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return loss, (targets >= 0).sum()


def rebuilt(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
    return (model(batch[0]) - batch[0]).square().sum(), batch[0].numel()


class UNet(nn.Module):
    """With batch norms, a skip connection, a parameter that is never used and one that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.middle = nn.Sequential(nn.Conv2d(8, 8, 3, 1, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.up = nn.ConvTranspose2d(16, 3, 4, 2, 1)
        self.unused = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.tensor(0.7), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(x)
        return self.scale * self.up(torch.cat((y, self.middle(y)), 1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 16)
        self.layers = nn.LSTM(16, 24, 2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(24, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(ids))[0])


class Odd(nn.Module):
    """With what modules may do: draws, recomputation, ties across blocks, and buffers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.orthogonal(nn.Linear(4, 4))  # has a buffer that is not contiguous
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(3))
        self.last = nn.Linear(4, 4)
        self.last.weight = self.layers[1][0].weight
        self.packed = nn.Parameter(torch.tensor([100_000_001, 3], dtype=torch.int32), requires_grad=False)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("phases", torch.polar(torch.ones(4), torch.arange(4.0)))
        self.register_buffer("mask", torch.tensor([True, False, True, True]))

    def forward(self, x: Tensor) -> Tensor:
        assert self.packed[0] == 100_000_001
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)  # also in evaluation
        self.phases *= torch.polar(torch.ones(()), x.sum().detach().float())
        y = self.first(x)
        for layer in self.layers:
            y = y + checkpoint(layer, y, use_reentrant=False)
        return self.last(y) * self.mask + self.phases.real


class Drawn:
    """Random samples. They must be the same each time the file is loaded."""

    base = torch.randn(64, 4)

    def __len__(self) -> int:
        return len(self.base)

    def __getitem__(self, i: int) -> Tensor:
        return self.base[i] + 0.1 * torch.randn(4) + random.random() + np.random.random()


def weighted(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
    return 0.01 * rebuilt(model, [batch])[0], batch.new_tensor([0.01 * len(batch)])


def words(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return cross_entropy(model(batch["ids"])[:, :-1], batch["ids"][:, 1:])


class Split(nn.Module):
    """Layers of every style of tensor parallelism, with sizes that do not divide, and a tied embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB + 1, 12, padding_idx=3)
        self.up, self.gate = nn.Linear(12, 16), nn.Linear(12, 16, bias=False)
        self.norm = nn.LayerNorm(4)
        self.down = nn.Linear(16, 12)
        self.mixed = nn.Linear(12, 13)
        self.last = nn.Linear(8, 12)
        self.head = nn.Linear(12, VOCAB + 1, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        heads = self.norm((self.up(x) * self.gate(x)).unflatten(-1, (-1, 4))).flatten(-2)
        x = x + self.down(heads)
        return self.head(x + self.last(self.mixed(x)[..., :8]))


split = OwnModel(Split, words, Tokens, tensor_parallel={
    "embedding": "embedding_rowwise", "head": "colwise_gather_output", "{up,gate}": "colwise", "down": "rowwise",
    "norm": "replicated_with_grad_allreduce", "mixed": "colwise_gather_output", "last": "rowwise_split_input",
})  # fmt: skip


class Grouped(nn.Module):
    """Attention with four heads of queries, and two of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, 12), nn.Linear(12, VOCAB)
        self.q, self.k, self.v, self.out = (nn.Linear(12, n) for n in (12, 6, 6, 12))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        q, k, v = (layer(x).unflatten(-1, (-1, 3)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.head(x + self.out(y.transpose(1, 2).flatten(2)))


grouped = OwnModel(Grouped, words, Tokens, tensor_parallel={
    "q": "colwise", "{k,v}": "colwise_kv:2", "out": "rowwise",
})  # fmt: skip



class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(4, 16, 12) / 4), nn.Parameter(torch.randn(4, 12, 16) / 4)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        y = torch.zeros_like(hidden_states)
        for i, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            token, place = torch.where(top_k_index == i)
            each = F.linear(F.linear(hidden_states[token], up).tanh(), down)
            y.index_add_(0, token, each * top_k_weights[token, place, None])
        return y


class Routed(nn.Module):
    """A layer of four experts, of which the last two get no token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.router, self.experts = nn.Embedding(VOCAB, 12), nn.Linear(12, 4), Experts()
        self.head = nn.Linear(12, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids).flatten(0, 1)
        scores, chosen = self.router(x)[:, :2].softmax(-1).topk(2)
        return self.head(x + self.experts(x, chosen, scores)).view(*ids.shape, -1)


routed = OwnModel(Routed, words, Tokens, expert_parallel={
    "experts": "ep_dispatch_experts", "experts.{up,down}": "grouped_gemm",
})  # fmt: skip


class Dense(nn.Module):
    """Layers without a table, one of them frozen, an unused one, dropout, and a constant that is made from values."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3 * 16 * 16, 32), nn.Linear(32, 3 * 16 * 16)
        self.mix, self.unused = nn.Linear(32, 32, bias=False).requires_grad_(False), nn.Linear(3, 3)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 32))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(F.gelu(self.up(x.flatten(1))), 0.4, self.training)
        hidden = self.mix(hidden) * self.scale * torch.tensor([1.0, 0.5]).repeat(16)
        return self.down(hidden).view_as(x)


def graded(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int, dict[str, tuple]]:
    loss, terms = rebuilt(model, batch)
    return loss, terms, {"root": (loss.detach().sqrt(), len(batch[0]))}


dense = OwnModel(Dense, graded, Images, tensor_parallel="auto")
tied = OwnModel(Split, words, Tokens, tensor_parallel="auto")



class Heads(nn.Module):
    """Attention of heads of size 4, whose values see the conditioning."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, conditioning: Tensor) -> Tensor:
        computed = self.q(x), self.k(x), self.v(x + conditioning.unsqueeze(1))
        q, k, v = (each.unflatten(-1, (-1, 4)).transpose(1, 2) for each in computed)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class DiffusionBlock(nn.Module):
    """Block of a diffusion transformer: norms are shifted, scaled and gated by the conditioning (adaLN)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.attention = Heads(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * width, width))
        self.modulation = nn.Linear(width, 6 * width)

    def forward(self, x: Tensor, conditioning: Tensor) -> Tensor:
        shift, scale, gate, *others = self.modulation(F.silu(conditioning)).unsqueeze(1).chunk(6, -1)
        x = x + gate * self.attention(self.norms[0](x) * (1 + scale) + shift, conditioning)
        shift, scale, gate = others
        return x + gate * self.mlp(self.norms[1](x) * (1 + scale) + shift)


class DiffusionTransformer(nn.Module):
    """Predicts the noise of images from their patches, the time and the class (Peebles and Xie 2023)."""

    def __init__(self, width: int = 16, patch: int = 4) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, patch, patch)
        self.positions = nn.Parameter(torch.randn(16, width) / 4)
        self.time = nn.Sequential(nn.Linear(8, width), nn.SiLU(), nn.Linear(width, width))
        self.classes = nn.Embedding(CLASSES, width)
        self.blocks = nn.ModuleList(DiffusionBlock(width) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 3 * patch**2)

    def forward(self, images: Tensor, time: Tensor, classes: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2) + self.positions
        waves = time.unsqueeze(1) * 2.0 ** torch.arange(4, device=time.device)
        conditioning = self.time(torch.cat((waves.sin(), waves.cos()), 1)) + self.classes(classes)
        for block in self.blocks:
            x = block(x, conditioning)
        return F.fold(self.head(self.norm(x)).transpose(1, 2), (16, 16), 4, stride=4)


def denoised(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    """Return the loss of the predicted noise, at times that are drawn with it."""
    images, classes = batch
    noise, time = torch.randn_like(images), torch.rand(len(images), device=images.device, dtype=images.dtype)
    level = time.view(-1, 1, 1, 1)
    return (model((1 - level) * images + level * noise, time, classes) - noise).square().sum(), noise.numel()


dit = OwnModel(DiffusionTransformer, denoised, Images, blocks=("blocks.0", "blocks.1"), tensor_parallel={
    "blocks.*": "sequence_parallel", "blocks.*.attention.{q,k,v}": "colwise", "blocks.*.attention.out": "rowwise",
    "blocks.*.mlp.0": "colwise", "blocks.*.mlp.3": "rowwise",
})  # fmt: skip


class Tower(nn.Module):
    """Modules one after the other, of several widths, with draws, recomputation and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.2))
        widths = (6, 8, 8, 5, 7, 6)
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Linear(a, b), nn.BatchNorm1d(b, momentum=0.3), nn.Dropout(0.3), nn.Tanh())
            for a, b in pairwise(widths)
        )
        self.scale = nn.Parameter(torch.tensor(0.7), requires_grad=False)
        self.unused = nn.Linear(3, 3)
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(6, 4, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        for i, part in enumerate(self.parts):
            y = checkpoint(part, y, use_reentrant=False) if i % 2 else part(y) * self.scale
        return F.linear(self.head(y), self.stem[0].weight[:4].t())


def measured(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor, dict[str, tuple[Tensor, int]]]:
    loss, terms = weighted(model, batch)
    return loss, terms, {"root": (loss.detach().sqrt(), len(batch))}


tower = OwnModel(Tower, measured, Drawn, pipeline=("parts",))
ODD_BLOCKS = ("layers.0", "layers.1", "layers.2")
odd = OwnModel(Odd, weighted, Drawn, blocks=ODD_BLOCKS)
nadam = OwnModel(
    Recurrent, words, Tokens, make_optimizer=torch.optim.NAdam, schedule=lambda step, steps: 0.1 / (2 + step)
)
class Counting(torch.optim.SGD):
    """Keeps a number in its groups."""

    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["updates"] = group.get("updates", 0) + 1
        super().step(closure)


counting = OwnModel(Recurrent, words, Tokens, make_optimizer=Counting)
factors = OwnModel(Recurrent, words, Tokens, make_optimizer=torch.optim.Adafactor)
unet = OwnModel(UNet, rebuilt, Images)
lstm = OwnModel(Recurrent, words, Tokens)


deep_unet = OwnModel(UNet, rebuilt, Images, pipeline=("down", "middle", "up"))
late_tower = OwnModel(
    Tower, measured, Drawn, pipeline=("parts",), make_optimizer=torch.optim.RMSprop,
    schedule=lambda step, steps: 1e-4 / (2 + step),
)
