"""Conversations: the template that makes text of messages, and which of its tokens count in the loss."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from shoal.base.errors import UsageError
from shoal.base.files import read_json, read_text

Message = dict[str, str]
"""A message: its ``role`` (system, user, assistant) and its ``content``."""

PLAIN = (
    "{% for m in messages %}{{ m.role | capitalize }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""Template of a model without one of its own, in which lines begin with the role."""

PLAIN_STOP = ("\nUser:", "\nSystem:", "\nAssistant:")


class ChatTemplate:
    """Function from messages to the text that a model continues, in the format of transformers' chat templates.

    Args:
        template: in the language of Jinja. It runs in a sandbox, as it comes from the folder of a model.
        names: names of special tokens that it may use, such as ``bos_token``.
        stop: texts that end a reply, besides the model's own ends.
    """

    def __init__(self, template: str, names: dict[str, str], stop: Sequence[str] = ()):
        import jinja2  # torch needs it too
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        self.names, self.stop = names, tuple(stop)
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
        self._errors = jinja2.TemplateError
        try:
            self._template = environment.from_string(template)
        except self._errors as error:
            raise UsageError(f"the chat template of the model is not valid: {error}") from None

    @classmethod
    def find(cls, folders: Iterable[Path]) -> ChatTemplate:
        """Return the template of the first folder that has one, or the plain one."""
        for folder in folders:
            file = folder / "tokenizer_config.json"
            values = read_json(file) if file.is_file() else {}
            values = values if isinstance(values, dict) else {}
            template = values.get("chat_template")
            if isinstance(template, list):  # several with names
                named = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
                template = named.get("default")
            if (own := folder / "chat_template.jinja").is_file():
                template = read_text(own)
            if isinstance(template, str):
                return cls(template, _special_names(values))
        return cls(PLAIN, {}, PLAIN_STOP)

    def render(self, messages: Sequence[Message]) -> str:
        """Return the text before the next reply.

        Raises:
            UsageError: the template refuses the messages.
        """
        try:
            return self._template.render(messages=list(messages), add_generation_prompt=True, **self.names)
        except (self._errors, TypeError, ValueError) as error:
            raise UsageError(f"the chat template of the model refuses these messages: {error}") from None


def _special_names(values: dict[str, Any]) -> dict[str, str]:
    """Return the special tokens that ``tokenizer_config.json`` names."""
    found = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        token = values.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            found[name] = token
    return found


def _refuse(message: str) -> None:
    raise ValueError(message)
