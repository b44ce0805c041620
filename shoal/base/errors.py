"""The error for bad input, and suggestions of valid values."""

import difflib
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache


class UsageError(Exception):
    """Bad input, found before any work starts; the message names the value, what is allowed and a remedy.

    The command line prints only the message, without a traceback, and exits with code 2.

    >>> raise UsageError("layout: tp = 3 does not divide 8 heads.\\n  Use tp = 2 or 4.")
    Traceback (most recent call last):
    shoal.base.errors.UsageError: layout: tp = 3 does not divide 8 heads.
      Use tp = 2 or 4.
    """


class DivergenceError(RuntimeError):
    """Error for NaN or infinite values in training, which a restart would most likely compute again.

    The ranks' parent prints only the message, without a traceback.
    """


def list_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and what caused it, the latest first."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def did_you_mean(given: str, allowed: Iterable[str]) -> str:
    """Return the end of an error message: the nearest allowed name, those that begin with what was given, or all.

    >>> did_you_mean("ZREO", ["zero", "tp", "pp"])
    "did you mean 'zero'?"
    >>> did_you_mean("interleaved", ["interleaved-zb", "interleaved-1f1b", "gpipe"])
    "did you mean 'interleaved-1f1b' or 'interleaved-zb'?"
    >>> did_you_mean("qqq", ["tp", "pp"])
    'allowed: pp, tp'
    """
    allowed = sorted(map(str, allowed))  # also members of an enumeration
    names = {name.lower(): name for name in allowed}
    near = [name for name in names if len(given) > 2 and name.startswith(given.lower())]
    if not 0 < len(near) <= 3:
        near = difflib.get_close_matches(given.lower(), names, n=1, cutoff=0.6)
    meant = " or ".join(repr(names[name]) for name in near)
    return f"did you mean {meant}?" if near else "allowed: " + ", ".join(allowed)


def from_os_error(error: OSError) -> UsageError:
    """Convert an error of the operating system to a `UsageError`: a missing file, no permission, a full disk, a used
    port.

    >>> str(from_os_error(PermissionError(13, "Permission denied", "/root/run")))
    '/root/run: permission denied.'
    """
    what = error.strerror or str(error) or type(error).__name__
    where = f"{error.filename}: " if error.filename else ""
    return UsageError(f"{where}{what[0].lower()}{what[1:].rstrip('.')}.")


SECRET = re.compile(
    r"TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|WEBHOOK|(^|_)(API)?KEY(_|$)|(^|_)(PASS|AUTH)$|_(PAT|PWD)$",
    re.IGNORECASE,
)
"""Pattern in the names of environment variables whose values must not appear in logs."""

SIGNED_IN = re.compile(r"(?<=://)[^\s/:@]*:([^\s/]+)(?=@)")
"""User and password of a URL, ``scheme://user:password@host``, in any variable."""

SHORTEST_SECRET = 6  # characters: shorter values would match everywhere


def redact(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """Remove secrets from a text: values of environment variables whose names match `SECRET`, and passwords of URLs in
    the text or the environment.

    >>> redact("401 for hf_abcdef", {"HF_TOKEN": "hf_abcdef"})
    '401 for [HF_TOKEN]'
    >>> redact("no answer from ftp://ann:pass@host/x", {})
    'no answer from ftp://[credentials]@host/x'
    """
    secrets = {password: name for name, value in environment.items() for password in SIGNED_IN.findall(value)}
    secrets |= {value: name for name, value in environment.items() if SECRET.search(name)}
    text = SIGNED_IN.sub("[credentials]", text)
    for value in sorted(secrets, key=len, reverse=True):  # one may contain another
        if len(value) >= SHORTEST_SECRET:
            text = text.replace(value, f"[{secrets[value]}]")
    return text


def nearest_divisors(value: int, *, of: int) -> list[int]:
    """Return the two divisors of ``of`` closest to ``value``, nearest first.

    >>> nearest_divisors(3, of=8)
    [2, 4]
    """
    return sorted(divisors(of), key=lambda d: (abs(d - value), d))[:2]


@cache
def divisors(n: int) -> tuple[int, ...]:
    """Return all divisors in ascending order.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return (*small, *(n // d for d in reversed(small) if d * d != n))
