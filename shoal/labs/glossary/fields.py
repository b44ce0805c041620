"""The fields of the config that a word belongs to, such as an optimizer's."""

from __future__ import annotations

import re
from typing import get_args

from pydantic import BaseModel

from shoal.base.section import docstrings
from shoal.base.usual_names import list_usual
from shoal.spec.config import RunConfig

MOST = 12
"""Fields of a word that says something; "the" is in a hundred."""


def find_fields(word: str) -> dict[str, str]:
    """Return the fields whose name, values or description have a word, as options with their descriptions.

    A field's full name, such as checkpoint.every, is that field alone. A name of another trainer is the fields that it
    means.

    >>> list(find_fields("Weight-Decay")), list(find_fields("muon"))[:1], find_fields("sheep"), find_fields("the")
    (['--optimizer.weight-decay'], ['--optimizer.name'], {}, {})
    >>> find_fields("checkpoint.every")
    {'--checkpoint.every': 'Steps between checkpoints; 0 saves only at the end and when the run is stopped.'}
    >>> list(find_fields("tensor-model-parallel-size")), list(find_fields("use_distributed_optimizer"))
    (['--parallel.tp'], ['--parallel.zero'])
    """
    pattern = re.compile(rf"(?<![a-z0-9]){'[ _-]?'.join(map(re.escape, re.split('[ _-]+', word)))}s?(?![a-z0-9])", re.I)
    usual = list_usual(word.lower().replace("-", "_"))
    found, meant = {}, {}
    for section, info in RunConfig.model_fields.items():
        kind = info.annotation
        if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
            continue
        about = docstrings(kind)
        for name, field in kind.model_fields.items():
            option = f"--{section}.{name.replace('_', '-')}"
            if word.replace("_", "-") == option[2:]:
                return {option: about.get(name, "")}
            if name in usual or f"{section}.{name}" in usual:
                meant[option] = about.get(name, "")
            values = " ".join(map(str, get_args(field.annotation)))
            if pattern.search(f"{name} {values} {about.get(name, '')}"):
                found[option] = about.get(name, "")
    return (found or meant) if len(found) <= MOST else {}
