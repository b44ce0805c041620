"""Products of sharded arrays: contracted dims, the four cases, and which blocks can be multiplied without a move."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import takewhile

from shoal.engine.sharding.named_axes import NamedMesh, Sharding, Sizes
from shoal.labs.autoshard.notation.notation import Expression


@dataclass(frozen=True)
class ShardedProduct:
    """One product of two arrays, given as the letters of the dims of each.

    A dim of both factors that the result lacks is contracted; one that the result has is a batch dim.

    >>> ShardedProduct("IJ", "JK", "IK").contracted
    'J'
    """

    left: str
    right: str
    out: str

    @property
    def contracted(self) -> str:
        return "".join(letter for letter in self.left if letter in self.right and letter not in self.out)

    @property
    def shared(self) -> str:
        """Dims of both factors, contracted or not."""
        return "".join(letter for letter in self.left if letter in self.right)

    @property
    def dims(self) -> str:
        """Every dim once."""
        return self.left + "".join(letter for letter in self.right if letter not in self.left)

    @property
    def einsum(self) -> str:
        return f"{self.left},{self.right}->{self.out}"

    def local(self, a: Sharding, b: Sharding) -> Sharding | None:
        """Return the sharding of the products of each device's blocks, or None if these are not the product.

        They are if every shared dim has the same axes in both, and no other axis shards (or is unreduced in) both. Axes
        of a contracted dim leave the result unreduced; so does an unreduced factor, since a product is linear in each.
        """
        if any(a.axes[letter] != b.axes[letter] for letter in self.shared):
            return None
        both = {axis for letter in self.shared for axis in a.axes[letter]}
        if (a.used & b.used) - both:
            return None
        axes = {**b.axes, **a.axes}
        unreduced = a.unreduced + b.unreduced + "".join(a.axes[letter] for letter in self.contracted)
        return Sharding(tuple((letter, axes[letter]) for letter in self.out)).with_unreduced(unreduced)

    def flops(self, a: Sharding, b: Sharding, sizes: Sizes, mesh: NamedMesh) -> float:
        """Count the FLOPs of one device: 2 for each element of the block of all dims."""
        axes = {**b.axes, **a.axes}
        return 2.0 * math.prod(sizes[letter] // mesh.size(axes[letter]) for letter in self.dims)


REMEDIES = {
    1: "multiply the blocks of each device; nothing is sent",
    2: "all-gather the sharded factor; or shard the other in the same way, and reduce after the product",
    3: "multiply the blocks of each device: terms of a sum; all-reduce or reduce-scatter them",
    4: "the blocks give only the diagonal of the result; all-gather one of the factors first",
}


def classify(product: ShardedProduct, a: Sharding, b: Sharding) -> list[tuple[int, str]]:
    """List which of the four cases (Austin et al. 2025, "Computation With Sharded Arrays") a product is, and why.

    Several cases apply together where they hold along different axes.

    >>> both = Sharding((("I", ""), ("J", "x"))), Sharding((("J", ""), ("K", "")))
    >>> classify(ShardedProduct("IJ", "JK", "IK"), *both)
    [(2, 'J is sharded along x in the left factor and not in the right one')]
    """
    found = []
    for letter in product.shared:
        left, right = a.axes[letter], b.axes[letter]
        if letter not in product.contracted:
            if left != right:
                found.append((2, f"batch dim {letter} is sharded along {left or 'nothing'} in the left factor "
                                 f"and along {right or 'nothing'} in the right one"))
        elif left == right != "":
            found.append((3, f"{letter} is sharded along {left} in both factors"))
        elif left and right:
            found.append((2, f"{letter} is sharded along {left} in the left factor and along {right} in the right one"))
        elif left or right:
            has, lacks = ("left", "right") if left else ("right", "left")
            why = f"{letter} is sharded along {left or right} in the {has} factor and not in the {lacks} one"
            found.append((2, why))
    for axis in sorted(a.used & b.used):
        one, other = _use(a, axis), _use(b, axis)
        contracted = one in product.contracted or other in product.contracted
        if not contracted and (one != other or one == "{U}"):
            found.append((4, f"{axis} is used by {one} of the left factor and by {other} of the right one"))
    return sorted(found, key=lambda finding: finding[0]) or [(1, "no contracted dim is sharded")]


def _use(sharding: Sharding, axis: str) -> str:
    return next((letter for letter, axes in sharding.dims if axis in axes), "{U}")


def list_products(expression: Expression) -> list[ShardedProduct]:
    """List the products of a chain, from left to right.

    In a product of two arrays, the dims that both have and the result lacks are contracted. In a longer chain a letter
    may return (`In[B, D] * Win[D, F] * Wout[F, D] -> Out[B, D]`), so there every dim that a factor shares with what
    stands before it is contracted, except dims that lead every array: these are batch dims.

    Raises:
        UsageError: a dim of the result is in no factor, or one that is not contracted is not in the result.
    """
    assert expression.result is not None, "products have a result"
    arrays, result = [array.sharding.letters for array in expression.arrays], expression.result.sharding.letters
    leading = takewhile(lambda letters: len(set(letters)) == 1, zip(*arrays, result, strict=False))
    batch = "".join(letters[0] for letters in leading)
    found, left = [], arrays[0]
    for number, right in enumerate(arrays[1:], 1):
        kept = result if len(arrays) == 2 else batch
        gone = {letter for letter in left if letter in right and letter not in kept}
        out = "".join(dict.fromkeys(letter for letter in left + right if letter not in gone))
        if number == len(arrays) - 1:
            for letter in out:
                if letter not in result:
                    where = number if letter in right else next(i for i, dims in enumerate(arrays) if letter in dims)
                    message = f"dim {letter} is in neither the result nor the other factor: nothing contracts it"
                    raise expression.refuse(where, letter, message)
            for letter in result:
                if letter not in out:
                    message = f"dim {letter} is contracted" if letter in gone else f"no factor leaves a dim {letter}"
                    raise expression.refuse(len(arrays), letter, f"{message}, so the result cannot have it")
            out = result
        found.append(ShardedProduct(left, right, out))
        left = out
    return found
