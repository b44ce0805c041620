"""Nothing but a clear error comes out of a reader, whatever is in its files: some cases of each.

For more: ``python -m tests.fuzz --cases 100000``.
"""

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings

from tests.fuzz.targets import TARGETS, target

CASES = {"config": 50, "checkpoint": 40, "data": 20, "run": 8, "model": 10, "schedule": 20, "catalog": 10, "words": 12}


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_but_a_clear_error_comes_out(name, tmp_path):
    cases, read = target(name, tmp_path)
    found = Counter()

    @settings(max_examples=CASES[name], suppress_health_check=list(HealthCheck), database=None)
    @given(cases)
    def every(case):
        found[read(case)] += 1

    for _ in range(20):
        every()
        if found["accepted"] and found["refused"]:  # else only one of both was tried
            return
    pytest.fail(f"{found}: nothing was accepted, or nothing refused")
