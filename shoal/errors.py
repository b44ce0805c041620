"""The one error that means "what you asked for cannot be", and how to suggest what can."""

import difflib
from collections.abc import Iterable


class UsageError(Exception):
    """Bad input, found before any work starts: what was given, what is allowed, how to mend it.

    The command line prints the message alone, without a traceback, and exits with code 2.
    """


def did_you_mean(given: str, allowed: Iterable[str]) -> str:
    """The tail of an error message: the nearest allowed name, or all of them.

    >>> did_you_mean("zreo", ["zero", "tp", "pp"])
    "did you mean 'zero'?"
    >>> did_you_mean("qqq", ["tp", "pp"])
    'allowed: pp, tp'
    """
    allowed = sorted(allowed)
    near = difflib.get_close_matches(given, allowed, n=1, cutoff=0.6)
    return f"did you mean '{near[0]}'?" if near else "allowed: " + ", ".join(allowed)


def nearest_divisors(value: int, *, of: int, count: int = 2) -> list[int]:
    """The divisors of ``of`` that are closest to ``value``, nearest first.

    >>> nearest_divisors(3, of=8)
    [2, 4]
    """
    divisors = [d for d in range(1, of + 1) if of % d == 0]
    return sorted(divisors, key=lambda d: (abs(d - value), d))[:count]
