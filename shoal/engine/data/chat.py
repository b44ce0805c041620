"""Conversations: the template that makes text of messages, and which of its tokens count in the loss."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from shoal.base.errors import UsageError
from shoal.base.files import read_json, read_text
from shoal.engine.data.tokenizer import FileTokenizer, Tokenizer

Message = dict[str, str]
"""A message: its ``role`` (system, user, assistant) and its ``content``."""

PLAIN = (
    "{% for m in messages %}{{ m.role | capitalize }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""Template of a model without one of its own, in which lines begin with the role."""

TEMPLATE_FILES = ("tokenizer_config.json", "chat_template.jinja")
"""Files beside a tokenizer in which a template may be."""

GENERATION_TAG = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")
"""Tag of transformers around what the assistant says, of which Jinja knows nothing."""

PLAIN_STOP = ("\nUser:", "\nSystem:", "\nAssistant:")


class ChatTemplate:
    """Function from messages to the text that a model continues, in the format of transformers' chat templates.

    Args:
        template: in the language of Jinja. It runs in a sandbox, as it comes from the folder of a model.
        names: names of special tokens that it may use, such as ``bos_token``.
        stop: texts that end a reply, besides the model's own ends.
    """

    def __init__(self, template: str, names: dict[str, str], stop: Sequence[str] = ()):
        import jinja2  # slow import
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        self.text, self.names, self.stop = template, names, tuple(stop)
        self.fingerprint = f"{template} {sorted(names.items())}"
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
        self._errors = jinja2.TemplateError
        try:
            self._template = environment.from_string(GENERATION_TAG.sub(_as_block, template))
        except self._errors as error:
            raise UsageError(f"the chat template of the model is not valid: {error}") from None

    @classmethod
    def find(cls, folders: Iterable[Path]) -> ChatTemplate:
        """Return the template of the first folder that has one, or the plain one."""
        for folder in folders:
            file = folder / TEMPLATE_FILES[0]
            values = read_json(file) if file.is_file() else {}
            values = values if isinstance(values, dict) else {}
            template = values.get("chat_template")
            if isinstance(template, list):  # several with names
                named = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
                template = named.get("default")
            if (own := folder / TEMPLATE_FILES[1]).is_file():
                template = read_text(own)
            if isinstance(template, str):
                return cls(template, _special_names(values))
        return cls(PLAIN, {}, PLAIN_STOP)

    def render(self, messages: Sequence[Message], *, reply: bool = True) -> str:
        """Return the text of messages and, for the next ``reply``, what comes before it.

        Raises:
            UsageError: the template refuses the messages.
        """
        try:
            return self._template.render(messages=list(messages), add_generation_prompt=reply, **self.names)
        except (self._errors, TypeError, ValueError) as error:
            raise UsageError(f"the chat template of the model refuses these messages: {error}") from None


class ConversationEncoder:
    """Encoder of conversations as training reads them, with the tokens that count in the loss.

    These are the assistant's messages with the end that the template puts after each, and the end of the document after
    the last one. A token counts if its first character does.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        folders = [tokenizer.path.parent] if isinstance(tokenizer, FileTokenizer) else []
        self._template = ChatTemplate.find(folders)
        self.fingerprint = xxhash.xxh3_128_hexdigest(self._template.fingerprint.encode())

    def encode(self, messages: Sequence[Message]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the ids [tokens] of a conversation, with the end of the document, and whether each counts, bool.

        A template may write a message of the assistant otherwise once more follow, such as without its reasoning. Then
        each of them ends a document of its own, in which it alone counts: what a model reads when it has to write it.

        Raises:
            UsageError: the template refuses the messages, or changes them for the next reply.
        """
        full = self._template.render(messages, reply=False)
        texts = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._template.render(messages[:number])
            through = self._template.render(messages[: number + 1], reply=False)
            if not through.startswith(before):
                raise UsageError(f"the chat template of the model writes message {number + 1} otherwise in its place.")
            texts.append((through, (len(before), len(through))))
        if all(full.startswith(through) for through, _ in texts):
            return [self._encode(full, [span for _, span in texts], ends=messages[-1]["role"] == "assistant")]
        return [self._encode(through, [span], ends=True) for through, span in texts]

    def _encode(self, text: str, spans: Sequence[tuple[int, int]], *, ends: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of a text and whether each counts: those that begin in a span, and the end of the document."""
        ids, starts = self._tokenizer.encode_with_starts(text)
        counts = np.zeros(len(ids) + 1, dtype=bool)
        for first, last in spans:
            counts[:-1] |= (starts >= first) & (starts < last)
        counts[-1] = ends
        counts[0] = False  # nothing precedes it
        return np.append(ids, self._tokenizer.end_of_document), counts


def _special_names(values: dict[str, Any]) -> dict[str, str]:
    """Return the special tokens that ``tokenizer_config.json`` names."""
    found = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        token = values.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            found[name] = token
    return found


def _as_block(tag: re.Match[str]) -> str:
    """Return a tag of Jinja that shows its block, with the same control of white space."""
    return f"{tag[1]}{'endif' if tag[2] else 'if true'}{tag[3]}"


def _refuse(message: str) -> None:
    raise ValueError(message)
