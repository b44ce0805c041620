"""The one error that means "what you asked for cannot be", and how to suggest what can."""

import difflib
import math
import os
import re
from collections.abc import Iterable, Mapping
from functools import cache


class UsageError(Exception):
    """Bad input, found before any work starts: what was given, what is allowed, how to mend it.

    The command line prints the message alone, without a traceback, and exits with code 2.

    >>> raise UsageError("layout: tp = 3 does not divide 8 heads.\\n  Use tp = 2 or 4.")
    Traceback (most recent call last):
    shoal.base.errors.UsageError: layout: tp = 3 does not divide 8 heads.
      Use tp = 2 or 4.
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


def of_system(error: OSError) -> UsageError:
    """What the operating system refuses, as bad input: a file that is not there or not allowed, a full disk, a port.

    >>> str(of_system(PermissionError(13, "Permission denied", "/root/run")))
    '/root/run: permission denied.'
    """
    what = error.strerror or str(error) or type(error).__name__
    where = f"{error.filename}: " if error.filename else ""
    return UsageError(f"{where}{what[0].lower()}{what[1:].rstrip('.')}.")


SECRET = re.compile(
    r"TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|WEBHOOK|(^|_)(API)?KEY(_|$)|(^|_)(PASS|AUTH)$|_(PAT|PWD)$",
    re.IGNORECASE,
)
"""What the name of an environment variable has in it whose value nobody should read in a log."""

SIGNED_IN = re.compile(r"(?<=://)[^\s/:@]*:([^\s/]+)(?=@)")
"""User and password of a URL, ``scheme://user:password@host``, whatever the name of the variable that holds it."""

SHORTEST_SECRET = 6  # letters: a shorter value would be found everywhere


def redact(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """A text without the values of the environment's secrets, by the names of their variables (`SECRET`), and without
    the passwords of URLs, the text's own or the environment's.

    >>> redact("401 for hf_abcdef", {"HF_TOKEN": "hf_abcdef"})
    '401 for [HF_TOKEN]'
    >>> redact("no answer from ftp://ann:pass@host/x", {})
    'no answer from ftp://[credentials]@host/x'
    """
    secrets = {password: name for name, value in environment.items() for password in SIGNED_IN.findall(value)}
    secrets |= {value: name for name, value in environment.items() if SECRET.search(name)}
    text = SIGNED_IN.sub("[credentials]", text)
    for value in sorted(secrets, key=len, reverse=True):  # one may be a part of another
        if len(value) >= SHORTEST_SECRET:
            text = text.replace(value, f"[{secrets[value]}]")
    return text


def nearest_divisors(value: int, *, of: int, count: int = 2) -> list[int]:
    """The divisors of ``of`` that are closest to ``value``, nearest first.

    >>> nearest_divisors(3, of=8)
    [2, 4]
    """
    return sorted(divisors(of), key=lambda d: (abs(d - value), d))[:count]


@cache
def divisors(n: int) -> tuple[int, ...]:
    """All divisors, smallest first.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return (*small, *(n // d for d in reversed(small) if d * d != n))
