"""``python -m tests.fuzz --cases 100000``: fuzz every reader in processes of bounded memory."""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.targets import TARGETS, Stuck, target

CHUNK = 2500  # cases of one process
MEMORY = 12 << 30  # of its address space: what asks for more fails loudly


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--cases", type=int, default=100_000, help="of each target")
    parser.add_argument("--target", choices=TARGETS, action="append", help="default: all")
    parser.add_argument("--seed", type=int, default=0, help="of the first process")
    parser.add_argument("--here", action="store_true", help="in this process, as one chunk")
    options = parser.parse_args()
    if options.here:
        print(json.dumps(chunk(options.target[0], options.cases, options.seed)))
        return 0
    failed = 0
    for name in options.target or TARGETS:
        begin, found = time.monotonic(), Counter()
        for start in range(0, options.cases, CHUNK):
            cases = min(CHUNK, options.cases - start)
            words = ["--here", "--target", name, "--cases", str(cases), "--seed", str(options.seed + start // CHUNK)]
            done = subprocess.run([sys.executable, "-X", "faulthandler", "-m", "tests.fuzz", *words],
                                  capture_output=True, text=True)
            if done.returncode:
                failed += 1
                print(f"{name}, seed {words[-1]}: exit {done.returncode}\n{done.stderr[-3000:]}", flush=True)
            else:
                found.update(json.loads(done.stdout.splitlines()[-1]))
                if done.stderr:
                    failed += 1
                    print(f"{name}, seed {words[-1]}:\n{done.stderr[-20_000:]}", flush=True)
        said = ", ".join(f"{count:,} {what}" for what, count in sorted(found.items()))
        print(f"{name}: {sum(found.values()):,} cases in {time.monotonic() - begin:.0f} s: {said}", flush=True)
    return 1 if failed else 0


def chunk(name: str, cases: int, number: int) -> dict[str, int]:
    """Some cases of a target in this process; the first failure of each kind and place is printed."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    found, seen = Counter(), set()
    with tempfile.TemporaryDirectory() as folder:
        drawn, read = target(name, Path(folder))

        @seed(number)
        @settings(max_examples=cases, deadline=None, database=None, suppress_health_check=list(HealthCheck),
                  phases=[Phase.generate])
        @given(drawn)
        def every(case):
            try:
                found[read(case)] += 1
            except (Exception, Stuck) as error:
                found[type(error).__name__] += 1
                place = traceback.extract_tb(error.__traceback__)[-1]
                if (where := (type(error), place.filename, place.lineno)) not in seen:
                    seen.add(where)
                    traceback.print_exc(limit=-8)
                    print(f"case: {case!r:.3000}\n", file=sys.stderr)

        every()
    return dict(found)


sys.exit(main())
