"""Small JSON values between ranks: short ones take one exchange, long ones two, and all come back as they were."""

from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch.distributed as dist

from shoal.engine.collectives.json_collectives import FIRST, SIZE, all_gather, broadcast, gather, world
from shoal.launch.worker_pool import Pool

FITS = FIRST - SIZE - 2  # letters of a text that fits into the first message, with its quotes


def exchange(lengths: list[int]) -> tuple[list[str], list[str], str, list[int]]:
    """Return what each collective gives this rank for its text of a length, and the number of exchanges of each."""
    text, found, counts = "x" * lengths[dist.get_rank()], [], []
    for collective in (all_gather, gather, broadcast):
        with ExitStack() as stack:
            names = ("all_gather", "gather", "broadcast")
            made = [stack.enter_context(patch.object(dist, name, wraps=getattr(dist, name))) for name in names]
            found.append(collective(text, world()))
        counts.append(sum(each.call_count for each in made))
    return *found, counts


@pytest.mark.parametrize("lengths", [(0, 3), (FITS, FITS), (FITS, FITS + 1), (FITS + 1, 0), (0, 9 * FITS)])
def test_values_of_any_length_come_back(pool: Pool, lengths):
    texts = ["x" * length for length in lengths]
    for rank, (every, on_first, first, counts) in enumerate(pool.run(exchange, 2, list(lengths))):
        assert every == texts and on_first == (texts if rank == 0 else []) and first == texts[0]
        longest = 1 + (max(lengths) > FITS)
        assert counts == [longest, longest, 1 + (lengths[0] > FITS)]
