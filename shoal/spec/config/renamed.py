"""Old names of config keys and options. Files, run folders and command lines may still use them."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

RENAMED_KEYS = {  # if several old keys are given, the first applies
    "testing.pace": "testing.min_step_seconds",
    "testing.dead": "testing.kill",
    "train.straggler": "testing.straggler",
    "train.pace": "testing.min_step_seconds",
    "train.dead": "testing.kill",
    "train.link_gbs": "testing.link_gbs",
    "optimizer.rates": "optimizer.lr_factors",
    "optimizer.minimum": "optimizer.min_lr_fraction",
    "failover.silence_seconds": "failover.heartbeat_timeout_seconds",
    "failover.stall_seconds": "failover.progress_timeout_seconds",
}
RENAMED_OPTIONS = {
    "keep_going": "auto_resume",  # train
    "plant": "inject",  # verify
    "seq": "sequence_length",  # plan, plan auto
}


def rename_keys(values: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Return a config's nested values with the old keys renamed, if the new key is not given too.

    Args:
        defaults: the config's default values. A run folder has every key, so a default value prints no note.
    """
    for old, new in RENAMED_KEYS.items():
        (section, key), (target, name) = old.split("."), new.split(".")
        there = values.get(section)
        if not isinstance(there, dict) or key not in there or not isinstance(values.get(target, {}), dict):
            continue
        values = values | {section: {k: v for k, v in there.items() if k != key}}
        values[target] = {name: there[key]} | values.get(target, {})
        if there[key] != defaults[target][name]:
            print_rename(old, new)
    return values


def rename_option(word: str) -> str:
    """Return a word of the command line with its option renamed, if that has an old name."""
    option, equals, value = word.partition("=")
    key = option.removeprefix("--").replace("-", "_")
    new = (RENAMED_KEYS | RENAMED_OPTIONS).get(key)
    if key == option or new is None:
        return word
    new = f"--{new.replace('_', '-')}"
    print_rename(option, new)
    return f"{new}{equals}{value}"


@cache
def print_rename(old: str, new: str) -> None:
    """Print a note on stderr, once per name, that a name has changed."""
    print(f"note: {old} is now {new}", file=sys.stderr)
