"""What nobody should write into a file: values of every kind, changes of a good tree, changes of good bytes; and the
writers of such trees and folders."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

NUMBERS = st.one_of(
    st.integers(-2, 9),
    st.sampled_from([2**16, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63)]),
    st.floats(),
)
WORDS = st.one_of(
    st.text(max_size=6),
    st.sampled_from([
        "", ".", "..", "/", "../../etc/passwd", "/etc/passwd", "/dev/zero", "~", "~nobody", "*", "**", "[",
        "a\0b", "\n", "x" * 300, "\u202e", "rank-00000.safetensors", "rank-00001.safetensors",
        "rank-00000.safetensors\n", "../rank-00000.safetensors", "train-00000.bin", "../train-00000.bin",
        "manifest.json", "F32", "BF16", "O", "|O",
        "<u2", "<u4", "<i8", "file:/etc/passwd", "file:/dev/zero", "auto", "true", "nan", "__class__", "{0.__class__}",
        "!!python/object/apply:os.system ['true']", "c__builtin__\neval\n(S'1'\ntR.",
    ]),
)  # fmt: skip
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, WORDS)
WILD = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3), max_leaves=4
)


@st.composite
def changed(draw: Callable, tree: Any, most: int = 3) -> Any:
    """A tree of JSON values with a few nodes replaced, removed, repeated or added."""
    tree = copy.deepcopy(tree)
    for _ in range(draw(st.integers(1, most))):
        nodes = [(parent, key) for parent in _inside(tree) for key in (_keys(parent))]
        if not nodes:
            return draw(WILD)
        parent, key = draw(st.sampled_from(nodes))
        match draw(st.sampled_from(["replace", "number", "remove", "add", "move"])):
            case "replace":
                parent[key] = draw(WILD)
            case "number":
                parent[key] = parent[key] + 1 if isinstance(parent[key], int) else draw(NUMBERS)
            case "remove":
                del parent[key]
            case "add" if isinstance(parent, dict):
                parent[draw(WORDS)] = draw(WILD)
            case "add":
                parent.insert(key, draw(WILD))
            case "move":  # what stands elsewhere in the tree, which may be of the right type
                other, place = draw(st.sampled_from(nodes))
                parent[key] = copy.deepcopy(other[place])
    return tree


def _inside(tree: Any) -> list[Any]:
    found, left = [], [tree]
    while left:
        node = left.pop()
        if isinstance(node, (dict, list)):
            found.append(node)
            left += node.values() if isinstance(node, dict) else node
    return found


def _keys(parent: Any) -> list[Any]:
    return list(parent) if isinstance(parent, dict) else list(range(len(parent)))


@st.composite
def changed_bytes(draw: Callable, content: bytes, most: int = 4) -> bytes:
    """Bytes with a few flipped, overwritten, cut out, repeated or put in."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, most))):
        place = draw(st.integers(0, len(data)))
        length = draw(st.sampled_from([1, 1, 4, 8, 100]))
        match draw(st.sampled_from(["flip", "write", "cut", "repeat", "end", "extreme"])):
            case "flip" if place < len(data):
                data[place] ^= 1 << draw(st.integers(0, 7))
            case "write":
                data[place : place + length] = draw(st.binary(min_size=length, max_size=length))
            case "cut":
                del data[place : place + length]
            case "repeat":
                data[place:place] = data[place : place + length]
            case "end":
                del data[place:]
            case _:
                extreme = draw(st.sampled_from([b"\xff", b"\0", b"\x7f", b'"', b"{", b"9"]))
                data[place : place + length] = extreme * length
    return bytes(data)


def toml(values: Any) -> str:
    """TOML of a tree whose tables may be none, and whose values may have none in TOML."""
    lines = []
    if not isinstance(values, dict):
        return _value(values)
    for section, fields in values.items():
        if isinstance(fields, dict):
            lines += [f"[{json.dumps(section)}]", *(f"{json.dumps(k)} = {_value(v)}" for k, v in fields.items())]
        else:
            lines.insert(0, f"{json.dumps(section)} = {_value(fields)}")
    return "\n".join(lines)


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    return "nan" if value is None else str(value) if isinstance(value, float) else json.dumps(value)


def put(path: Path, files: Mapping[str, bytes | str | None]) -> None:
    """Make a folder of these files by their names in it; a text is where a link leads, None a folder, "|" a pipe."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    for name, content in files.items():
        (file := path / name).parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            file.mkdir()
        elif content == "|":
            os.mkfifo(file)
        elif isinstance(content, str):
            file.symlink_to(content)
        else:
            file.write_bytes(content)
