"""Errors of a definition's code in one sentence, with its own last line; and that code as bytes, with its lines."""

from __future__ import annotations

import io
import os
import sys
from collections import ChainMap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import extract_tb, walk_tb
from types import CodeType
from typing import Any, ClassVar

import cloudpickle
import torch
import torch.distributed as dist
from torch import nn

from shoal.base.errors import UsageError, list_causes
from shoal.engine.collectives.shm.progress import PeerLost

NOT_ITS_OWN = (f"{Path(__file__).parents[2]}{os.sep}", f"{sys.base_prefix}{os.sep}", "<frozen")
"""Beginnings of the names of files of shoal and of Python."""

TRANSIENT = (OSError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError, dist.DistError, PeerLost)
"""Errors that may not recur in another attempt, also if a definition's code raises them."""

AUTOGRAD = "_engine_run_backward"
"""Function of torch in whose frame an error of a backward operator ends."""


@contextmanager
def explained(what: str, remedy: str = "", *, only_its_own: bool = False) -> Iterator[None]:
    """Raise errors of a definition's code in the context as `UsageError`: it would fail again in every attempt.

    Args:
        what: what the code is, such as "its loss()".
        only_its_own: leave errors that neither its code nor a backward operator raises.
    """
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        if _is_transient(error) or (only_its_own and not _is_its_own(error)):
            raise
        raise UsageError(f"model.module: {what} fails{_place(error)}: {explain(error)}."
                         + (f"\n  {remedy}" if remedy else "")) from error


def pickle_code(value: object) -> bytes:
    """Pickle a value with the code of its functions, and with the names of their files for the errors that they raise.

    cloudpickle 3.1 gives all code the file ``<dynamic-code>``.
    """
    to = io.BytesIO()
    _CodePickler(to).dump(value)
    return to.getvalue()


def _reduce_code(code: CodeType) -> tuple[Any, ...]:
    make, parts = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return make, tuple(code.co_filename if part == "<dynamic-code>" else part for part in parts)


class _CodePickler(cloudpickle.Pickler):
    dispatch_table: ClassVar = ChainMap({CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table)


def explain(error: BaseException) -> str:
    """Return an error of a definition's code in one line, with the last line of that code."""
    frames = [frame for frame in extract_tb(error.__traceback__) if _is_own_file(frame.filename)]
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    message = str(error).strip().splitlines()
    return f"{type(error).__name__}: {message[0].rstrip('.') if message else ''}{where}"


def _is_own_file(name: str) -> bool:
    return "site-packages" not in name and not name.startswith(NOT_ITS_OWN)


def _is_its_own(error: Exception) -> bool:
    frames = extract_tb(error.__traceback__)
    return frames[-1].name == AUTOGRAD or any(_is_own_file(frame.filename) for frame in frames)


def _is_transient(error: BaseException) -> bool:
    for each in list_causes(error):
        by_gloo = isinstance(each, RuntimeError) and "gloo" in str(each)
        if by_gloo or (isinstance(each, TRANSIENT) and not isinstance(each, FileNotFoundError)):
            return True
    return False


def _place(error: BaseException) -> str:
    """Return the innermost module whose forward raised an error, by its name in the outermost one."""
    modules = [own for frame, _ in walk_tb(error.__traceback__)
               if isinstance(own := frame.f_locals.get("self"), nn.Module)]
    if not modules:
        return ""
    name = next((name for name, module in modules[0].named_modules() if module is modules[-1]), "")
    return f" in {name}, a {type(modules[-1]).__name__}" if name else ""
