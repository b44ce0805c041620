"""Plain modules that shoal does not know, with their losses and samples."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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


def words(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return cross_entropy(model(batch["ids"])[:, :-1], batch["ids"][:, 1:])


unet = OwnModel(UNet, rebuilt, Images)
lstm = OwnModel(Recurrent, words, Tokens)
