"""Products of sharded arrays: which dims are contracted, which of the four cases it is, what multiplies as it is."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shoal.labs.autoshard.notation.notation import Expression, NamedMesh, Sharding, Sizes


@dataclass(frozen=True)
class ShardedProduct:
    """One product of two arrays; the dims of each by their letters.

    A dim of both that is not in the result is contracted; one of both that is in the result is a batch dim.

    >>> ShardedProduct("IJ", "JK", "IK").contracted
    'J'
    """

    left: str
    right: str
    out: str

    @property
    def contracted(self) -> str:
        """Dims that are summed over."""
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
        """As torch.einsum has it."""
        return f"{self.left},{self.right}->{self.out}"

    def local(self, a: Sharding, b: Sharding) -> Sharding | None:
        """What comes of multiplying the blocks that each device has, or None if that is not the product.

        It is, if every shared dim is sharded alike in both, and no other axis shards (or is unreduced in) both. Axes
        of a contracted dim leave the result unreduced; a factor that is unreduced leaves it so too, since a product
        is linear in each factor.
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
        """Of one device: a multiplication and an addition for each element of the block of all dims."""
        axes = {**b.axes, **a.axes}
        return 2.0 * math.prod(sizes[letter] // mesh.size(axes[letter]) for letter in self.dims)


@dataclass(frozen=True)
class ProductFact:
    """One thing to know about a product as it is given.

    Attributes:
        case: 1 to 4 (Austin et al. 2025, "Computation With Sharded Arrays").
        words: where it is so.
    """

    case: int
    words: str


REMEDIES = {
    1: "multiply what each device has; nothing need be sent",
    2: "all-gather the sharded factor; or shard the other alike, and reduce after the product",
    3: "multiply what each device has: parts of a sum; all-reduce or reduce-scatter them",
    4: "the blocks in hand give only the diagonal of the result; all-gather one of the factors first",
}


def cases(product: ShardedProduct, a: Sharding, b: Sharding) -> list[ProductFact]:
    """Which of the four cases a product is; several at once where it is so along different axes.

    >>> both = Sharding((("I", ""), ("J", "x"))), Sharding((("J", ""), ("K", "")))
    >>> cases(ShardedProduct("IJ", "JK", "IK"), *both)
    [ProductFact(case=2, words='J is sharded along x in the left factor and not in the right one')]
    """
    found = []
    for letter in product.contracted:
        left, right = a.axes[letter], b.axes[letter]
        if left == right != "":
            found.append(ProductFact(3, f"{letter} is sharded along {left} in both factors"))
        elif left and right:
            words = f"{letter} is sharded along {left} in the left factor and along {right} in the right one"
            found.append(ProductFact(2, words))
        elif left or right:
            sides = ("left", "right") if left else ("right", "left")
            words = f"{letter} is sharded along {left or right} in the {sides[0]} factor and not in the {sides[1]} one"
            found.append(ProductFact(2, words))
    for axis in sorted(a.used & b.used):
        one, other = _use(a, axis), _use(b, axis)
        contracted = one in product.contracted or other in product.contracted
        if not contracted and (one != other or one == "{U}"):
            found.append(ProductFact(4, f"{axis} is used by {one} of the left factor and by {other} of the right one"))
    for letter in product.shared:
        left, right = a.axes[letter], b.axes[letter]
        if letter not in product.contracted and left != right:
            words = f"batch dim {letter} is sharded along {left or 'nothing'} in the left factor and along "
            found.append(ProductFact(2, words + f"{right or 'nothing'} in the right one"))
    return sorted(found, key=lambda finding: finding.case) or [ProductFact(1, "no contracted dim is sharded")]


def _use(sharding: Sharding, axis: str) -> str:
    return next((letter for letter, axes in sharding.dims if axis in axes), "{U}")


def products(expression: Expression) -> list[ShardedProduct]:
    """The products of a chain, from left to right.

    In a product of two arrays, what both have and the result does not is contracted. In a longer chain a letter may
    come back (`In[B, D] * Win[D, F] * Wout[F, D] -> Out[B, D]`), so there all that a factor shares with what stands
    before it is contracted, but for dims that lead every array: those are batch dims.

    Raises:
        UsageError: a dim of the result is in no factor, or one that is not contracted is not in the result.
    """
    assert expression.result is not None, "products have a result"
    arrays, result = [array.sharding.letters for array in expression.arrays], expression.result.sharding.letters
    batch = _leading([*arrays, result])
    found, left = [], arrays[0]
    for number, right in enumerate(arrays[1:], 1):
        last = number == len(arrays) - 1
        kept = result if len(arrays) == 2 else batch
        gone = {letter for letter in left if letter in right and letter not in kept}
        out = "".join(dict.fromkeys(letter for letter in left + right if letter not in gone))
        if last:
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


def _leading(arrays: list[str]) -> str:
    """The dims with which all of them begin."""
    batch = ""
    for letters in zip(*arrays, strict=False):
        if len(set(letters)) > 1:
            break
        batch += letters[0]
    return batch
