"""`shoal explain SUBJECT`: show how something works and what it costs, computed by the code that runs it."""

from __future__ import annotations

import shoal
from shoal.base.errors import UsageError
from shoal.base.options import listed, parse
from shoal.labs.collectives.description import Collective
from shoal.labs.explain.subjects import PRODUCT, SUBJECTS, WordOptions, find_subject


def main(args: list[str]) -> int:
    """Explain one subject; return the exit code."""
    if not args or args[0] in ("-h", "--help"):
        collectives = [each.value for each in Collective]
        about = {name: options.__doc__ or "" for name, (options, _) in SUBJECTS.items() if name not in collectives}
        of_one = (SUBJECTS[Collective.ALL_REDUCE][0].__doc__ or "").partition("\n")[0]
        about["all-reduce, ..."] = f"{of_one} The eight: {', '.join(collectives)}."
        about[PRODUCT.replace(PRODUCT[11:-1], "...")] = find_subject(PRODUCT)[0].__doc__ or ""
        about["1f1b, ..."] = WordOptions.__doc__ or ""
        print("Show how one thing works and what it costs, by the code that runs it.\n")
        print("shoal explain SUBJECT [--help]\n")
        print(*listed(about, 16), sep="\n")
        raise SystemExit(0)
    subject, *rest = args
    if "[" not in subject:  # a name of several words
        while rest and not rest[0].startswith("-"):
            subject += f" {rest.pop(0)}"
    product = "[" in subject
    if product and any("]" in word for word in rest):
        expression = " ".join(args[: 1 + max(i for i, word in enumerate(args) if "]" in word)])
        raise UsageError(f'explain {subject}: quote the expression, so that it is one word: "{expression}"')
    options = parse(f"shoal explain {PRODUCT if product else subject}", find_subject(subject)[0], rest)
    shoal.explain(subject, **dict(options))
    return 0
