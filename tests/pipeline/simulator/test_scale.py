"""A simulation of a large cluster ends soon, and in little memory."""

import resource
import subprocess
import sys
import time
from textwrap import dedent

import numpy as np

from shoal.pipeline.program import build_program
from shoal.pipeline.schedules import SCHEDULES
from shoal.pipeline.simulator import Disturbance, simulate


def test_16384_ranks_in_under_2_seconds() -> None:
    """16 pipeline ranks, 64 micro-batches, 1,024 replicas: with one straggler, and with noise on every rank."""
    begin = time.process_time()
    program = build_program(SCHEDULES["1f1b"], 16, 64)
    even = simulate(program, dp=128, tp=8)
    slow = simulate(program, dp=128, tp=8, disturbance=Disturbance({9000: 1.5}))
    assert time.process_time() - begin < 2
    assert even.replicas.tolist() == [128] and slow.replicas.tolist() == [127, 1]
    assert slow.step_time > even.step_time


def test_noise_on_every_of_16384_ranks() -> None:
    program = build_program(SCHEDULES["1f1b"], 16, 64)
    noisy = simulate(program, dp=1024, disturbance=Disturbance(jitter=0.05))
    assert len(noisy.replicas) == 1024
    assert len(np.unique(noisy.own_span)) == 16 * 1024


def test_a_quarter_of_a_million_micro_batches_that_all_differ() -> None:
    """256 ranks and 1,024 micro-batches in a sixteenth of what 1,024 ranks and 4,096 may take: 60 s and 4 GiB."""
    script = """
        import numpy as np
        from shoal.pipeline.program import build_program
        from shoal.pipeline.schedules import SCHEDULES
        from shoal.pipeline.simulator import ActionTimes, MessageTimes, simulate
        random = np.random.default_rng(0)
        p, m = 256, 1024
        times = ActionTimes(*(random.uniform(0.5, 1.5, (p, m)) for _ in range(3)))
        links = MessageTimes(*(random.uniform(0, 0.1, (p, p)) for _ in range(2)))
        timeline = simulate(build_program(SCHEDULES["1f1b"], p, m, transfers=False), times, links)
        assert timeline.busy.shape == (1, p) and timeline.peak_live.max() == p
        # Its own alone: getrusage counts what its parent had when it was forked.
        [peak] = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
        assert int(peak.split()[1]) < 1024 * 1024, peak  # KiB
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    subprocess.run([sys.executable, "-c", dedent(script)], check=True)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 60 / 4
