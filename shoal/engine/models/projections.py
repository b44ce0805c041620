"""What modules have in common whose first matrices multiply one input."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from torch import Tensor, nn


class JointProjections(nn.Module):
    """A module that begins with linear layers of one input.

    Attributes:
        projections: their names.
        project: what they make of the input; a single module may have a function of its own in its place, which makes
            all of them together.
    """

    projections: ClassVar[tuple[str, ...]]
    project: Callable[[Tensor], tuple[Tensor, ...]]
