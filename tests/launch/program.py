"""What the ranks of `test_local_launcher` do: meet, and what the payload says."""

import json
import os
import signal
import time
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from shoal.base.errors import UsageError
from shoal.engine.device import destroy_world
from shoal.launch.rank_env import detect_rank_env, read_payload, scratch_folder
from shoal.launch.rendezvous import become_rank

if __name__ == "__main__":
    payload = read_payload() if "SHOAL_SCRATCH" in os.environ else json.loads(os.environ["PAYLOAD"])
    member = detect_rank_env()
    become_rank(member, "cpu", records=scratch_folder() if member.how == "local" else None)
    folder, act, me = Path(payload["folder"]), payload["act"], member.rank
    if act == "stop":
        signals = []
        signal.signal(signal.SIGTERM, lambda *_: signals.append("SIGTERM"))
        signal.signal(signal.SIGINT, lambda *_: signals.append("SIGINT"))
    total = torch.ones(1)
    dist.all_reduce(total)
    (folder / f"{me}.json").write_text(json.dumps({
        "pid": os.getpid(), "total": total.item(), "threads": torch.get_num_threads(), **asdict(member)}))
    dist.barrier()  # all have written: a rank that ends now takes the others with it
    if act == "stop":
        while not signals:
            time.sleep(0.02)
        time.sleep(0.8)
        (folder / f"signals-{me}.json").write_text(json.dumps(signals))
    elif act != "finish":
        if act == "die slowly":
            if me == 0:
                raise ConnectionError("peer closed the connection")
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # who is being killed is past other signals
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
        if me == 1:
            if act == "raise":
                raise ArithmeticError("the real cause")
            if act == "usage":
                raise UsageError("steps = -1; allowed: 1 or more")
            if act == "die":
                os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(total)  # never completes: rank 1 sleeps, or is gone
        if me == 1 or act == "sleep":
            time.sleep(1000)
    if me == 0:
        print("rank 0 is heard")
    destroy_world()
