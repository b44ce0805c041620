"""The rendezvous store of ranks on one host."""

from datetime import timedelta

import pytest
import torch.distributed as dist

from shoal.engine.collectives.folder_store import FolderStore


def count_up(folder) -> tuple[int, list[bytes]]:
    store, rank, ranks = FolderStore(folder), dist.get_rank(), dist.get_world_size()
    for _ in range(50):
        store.add("turns", 1)
    store.set(f"rank {rank}", str(rank))
    others = [store.get(f"rank {other}") for other in range(ranks)]
    dist.barrier()
    return store.add("turns", 0), others


def test_no_turn_is_lost_and_all_ranks_read_what_each_has_set(pool, tmp_path):
    assert pool.run(count_up, 4, tmp_path / "store") == [(200, [b"0", b"1", b"2", b"3"])] * 4


def test_a_key_that_nobody_sets_is_named(tmp_path):
    store = FolderStore(tmp_path / "store")
    store.set_timeout(timedelta(seconds=0.02))
    store.set("a", b"\0")
    assert store.get("a") == b"\0" and store.delete_key("a") and not store.delete_key("a")
    with pytest.raises(dist.DistStoreError, match="no process has set a in"):
        store.wait(["a"])
