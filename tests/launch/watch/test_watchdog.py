"""Who is lost and who is not, judged from signs that are made up: no clock, no process."""

import faulthandler
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shoal
from shoal.engine.collectives.ops import to_host
from shoal.launch.watch.watchdog import (
    LONGEST_GAP,
    SLOW_SECONDS,
    START_SECONDS,
    STOPPED_SECONDS,
    Sign,
    Watchdog,
    find_stuck_rank,
    is_waiting,
)
from shoal.spec.config import FailoverConfig
from shoal.training.resilience.heartbeat import HeartbeatRecord, Phase

SHOAL = Path(shoal.__file__).parent
LIMITS = FailoverConfig(heartbeat_timeout_seconds=10, progress_timeout_seconds=20)


def record(
    now: float = 0.0, count: int = 1, phase: Phase = Phase.STEP, steps: int = 5, begun: int = 0
) -> HeartbeatRecord:
    return HeartbeatRecord(1, now, now, count, phase, begun, steps, 1.0)


def watch(dog: Watchdog, seconds: float, sign, start: float = 0.0, gap: float = 0.25):
    """Look every ``gap`` seconds at what ``sign(now)`` gives; returns the first trouble and when it was found."""
    now = start
    while now < start + seconds:
        if trouble := dog.look(dict(enumerate(sign(now))), now):
            return trouble, now - start
        now += gap
    return None, seconds


@given(
    beats=st.lists(st.floats(0.1, 2.0), min_size=5, max_size=40),
    steps=st.lists(st.floats(0.05, 19.0), min_size=5, max_size=40),
    gap=st.floats(0.05, 5.0),
)
def test_a_healthy_run_is_left_alone_however_irregular(beats, steps, gap):
    """Signs of life up to 2 s apart and steps of up to 19 s, looked at as rarely as may be."""
    total = min(sum(beats), sum(steps))

    def sign(now: float) -> list[Sign]:
        def done(times: list[float]) -> tuple[int, float]:
            t = n = 0
            while n < len(times) and t + times[n] <= now:
                t, n = t + times[n], n + 1
            return n, t
        (_, alive), (n, marked) = done(beats), done(steps)
        return [Sign(HeartbeatRecord(1, alive, marked, n, Phase.STEP, 0, n, 0.0), "S", 0.0)]

    assert watch(Watchdog(LIMITS), total, sign, gap=gap)[0] is None


@given(rank=st.integers(0, 3), slow=st.floats(0.05, 1.0))
def test_a_stopped_rank_is_found_in_two_seconds(rank, slow):
    def sign(now: float) -> list[Sign]:
        well = Sign(record(now), "S", now)
        return [replace_sign(well, rank == r) for r in range(4)]

    def replace_sign(well: Sign, stopped: bool) -> Sign:
        return Sign(replace(well.record, alive=0.0, marked=0.0), "T", 0.0) if stopped else well

    trouble, after = watch(Watchdog(LIMITS), 60, sign, gap=slow)
    assert (trouble.rank, trouble.trouble) == (rank, "is stopped (SIGSTOP)")
    assert STOPPED_SECONDS <= after <= STOPPED_SECONDS + 2 * slow


@pytest.mark.parametrize(("state", "after", "what"), [
    ("T", STOPPED_SECONDS, "is stopped (SIGSTOP)"), ("S", START_SECONDS, "is silent"), ("", 0, ""), ("Z", 0, ""),
])
def test_a_rank_is_watched_before_its_first_heartbeat_and_not_after_its_end(state, after, what):
    well = [Sign(record(count=0), "S", 0.0), Sign(None, state, 0.0)]
    found, seconds = watch(Watchdog(LIMITS), 90, lambda now: [Sign(record(now, int(now)), "S", now), well[1]])
    assert (found.rank, found.trouble) == (1, what) and after <= seconds <= after + 1 if what else found is None


@pytest.mark.parametrize("alive", [None, -5.0])
def test_a_silent_rank_was_well_at_its_last_sign_and_is_found_among_those_to_judge(alive):
    dog, silent = Watchdog(LIMITS), Sign(record(alive) if alive else None, "S", 0.0)
    for judged in ({0}, {0, 1}):
        for second in range(200):
            signs = {0: Sign(record(second, count=second), "S", second), 1: silent}
            if found := dog.look(signs, float(second), judged):
                break
        assert (found is not None) == (1 in judged)
    assert found.rank == 1 and found.when == (alive or 0.0)


def test_silence_counts_only_while_the_processor_is_idle():
    """A thread that holds the interpreter's lock and computes lets no other thread beat: that is no trouble."""
    for busy in (lambda now: Sign(record(), "R", 0.02 * now), lambda now: Sign(record(), "S", 0.5 * now)):
        assert watch(Watchdog(LIMITS), 19, lambda now, busy=busy: [busy(now)])[0] is None
    idle, after = watch(Watchdog(LIMITS), 60, lambda now: [Sign(record(), "S", 3 + 0.02 * now)])
    assert (idle.rank, idle.trouble) == (0, "is silent") and 10 <= after <= 10.5


def test_nobody_is_silent_who_slept_with_the_watchdog():
    """A laptop's lid, or a supervisor that was stopped: an hour goes by between two looks."""
    dog = Watchdog(LIMITS)
    assert dog.look({0: Sign(record(), "S", 0.0)}, 0.0) is None
    for wake in range(1, int(10 / LONGEST_GAP) - 1):
        assert dog.look({0: Sign(record(), "S", 0.0)}, wake * 3600.0) is None


@pytest.mark.parametrize("slowest", [0.5, 30.0])
def test_a_stall_is_measured_by_the_steps_before(slowest):
    """Five steps, each of which marks its progress twice; then nobody gets on."""
    end = 5 * slowest

    def sign(now: float) -> list[Sign]:
        done = int(min(now, end) / slowest)
        marks = int(min(now, end) / slowest * 2)
        return [Sign(record(now, count=marks, steps=done, begun=0), "S", now)] * 2

    trouble, after = watch(Watchdog(LIMITS), 1000, sign)
    assert (trouble.rank, trouble.trouble) == (-1, "is stuck")
    assert end + 20 + 3 * slowest - 1 <= after <= end + 20 + 3 * slowest + 1.5


@pytest.mark.parametrize(("phase", "steps"), [
    (Phase.START, 0), (Phase.STEP, 0), (Phase.VALIDATE, 5), (Phase.SAVE, 5), (Phase.END, 5),
])
def test_what_may_take_long_has_minutes(phase, steps):
    """The first step (which compiles) too."""
    trouble, after = watch(Watchdog(LIMITS), 2000, lambda now: [Sign(record(now, phase=phase, steps=steps), "S", 0)])
    assert trouble.trouble == "is stuck" and SLOW_SECONDS <= after <= SLOW_SECONDS + 1


def test_one_rank_that_waits_for_another_is_no_stall():
    """So long as anybody gets on."""
    def sign(now: float) -> list[Sign]:
        return [Sign(record(now, count=1), "S", now), Sign(record(now, count=int(now)), "S", now)]

    assert watch(Watchdog(LIMITS), 200, sign)[0] is None


def stack(*files: str) -> str:
    lines = "\n".join(f'  File "/x/{file}", line 1 in f' for file in files)
    other = 'Thread 0x1 (most recent call first):\n  File "/x/threading.py", line 1 in wait\n\n'
    return f"{other}Current thread 0x2 (most recent call first):\n{lines}\n"


WAITS = stack(
    "shoal/engine/collectives/shm/progress.py",
    "shoal/engine/collectives/ops.py",
    "shoal/engine/parallel/zero/zero_engine.py",
)
WORKS = stack("torch/nn/functional.py", "shoal/engine/models/attention.py", "shoal/engine/runtime.py")


def test_a_rank_that_reads_what_a_device_has_yet_to_sum_waits(tmp_path):
    """NCCL's collectives are only queued: it is the read in which the host waits for the others."""
    class Summed:
        def tolist(self):
            with open(tmp_path / "stack", "w") as file:
                faulthandler.dump_traceback(file)

    to_host(Summed())
    assert is_waiting((tmp_path / "stack").read_text())


def test_no_line_reads_what_it_sums_where_it_is_not_seen():
    unseen = re.compile(r"all_reduce\(.*\)\.(tolist|item|cpu)\(\)|(int|float|bool|isfinite)\(all_reduce\(")
    files = [path for folder in ("training", "engine/parallel", "launch") for path in (SHOAL / folder).rglob("*.py")]
    assert len(files) > 50
    assert [path for path in files if unseen.search(path.read_text())] == []


def test_the_stuck_rank_is_the_one_that_does_not_wait():
    assert is_waiting(WAITS) and not is_waiting(WORKS)
    records = {rank: record(count=10 - rank) for rank in range(3)}
    assert find_stuck_rank({0: WAITS, 1: WORKS, 2: WAITS}, records) == 1
    assert find_stuck_rank({0: WAITS, 1: WAITS, 2: WAITS}, records) == 2  # the one that has come least far
    assert find_stuck_rank({0: WAITS, 1: WAITS, 2: WAITS}, records | {0: record(steps=4)}) == 0
    assert find_stuck_rank({0: "", 1: WAITS, 2: WORKS}, records) == 2  # a stack that was not written tells nothing
