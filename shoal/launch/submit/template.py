"""Fill the template of a file that a cluster reads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.resources import files

PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")


def fill(name: str, values: Mapping[str, object]) -> str:
    """Return a template with its placeholders ``{{name}}`` replaced.

    A line with a value of None is left out. A value of several lines, which stands alone on its line, keeps the
    placeholder's indentation on each of them. Blank lines that follow each other become one.

    Args:
        name: file among the templates.
    """
    lines = []
    for line in (files(__package__) / "templates" / name).read_text().splitlines():
        found = PLACEHOLDER.findall(line)
        if any(values[each] is None for each in found):
            continue
        newline = "\n" + line[: len(line) - len(line.lstrip())]
        filled = line
        for each in found:
            filled = filled.replace(f"{{{{{each}}}}}", str(values[each]).replace("\n", newline))
        lines += [part.rstrip() for part in filled.split("\n")] if found else [filled]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + "\n"
