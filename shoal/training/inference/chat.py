"""Conversation with a trained model, by the chat template of its tokenizer or a plain one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from shoal.base.errors import UsageError
from shoal.base.files import read_json, read_text
from shoal.engine.data.tokenizer import FileTokenizer
from shoal.training.inference.generate import Sampling
from shoal.training.inference.sample import Show, continue_texts
from shoal.training.inference.source import ModelSource
from shoal.training.step.model_state import ModelState

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


class Chat:
    """A conversation.

    Args:
        system: message that comes before all others; "" for none.

    Attributes:
        messages: all messages so far.
    """

    def __init__(
        self, model: ModelState, source: ModelSource, template: ChatTemplate, sampling: Sampling, system: str = ""
    ):
        self.model, self.template = model, template
        tokenizer, end = source.tokenizer, template.names.get("eos_token", "")
        named = tokenizer.find(end) if isinstance(tokenizer, FileTokenizer) and end else None
        self.source = source if named is None else replace(source, ends=source.ends | {named})
        self.sampling = replace(sampling, stop=(*sampling.stop, *template.stop))
        self.messages: list[Message] = [{"role": "system", "content": system}] if system else []

    def reply(self, text: str, show: Show | None = None) -> str:
        """Return the reply to a message; both are part of the conversation from now on.

        A reply that Ctrl-C interrupts ends there.

        Args:
            show: gets the reply piece by piece, while it is generated.
        """
        shown: list[str] = []

        def take(piece: str) -> None:
            shown.append(piece)
            if show:
                show(piece)

        self.messages.append({"role": "user", "content": text})
        with suppress(KeyboardInterrupt):
            continue_texts(self.model, self.source, [self._encode()], self.sampling, take)
        answer = "".join(shown).strip()
        self.messages.append({"role": "assistant", "content": answer})
        # Each reply has random numbers of its own.
        self.sampling = replace(self.sampling, seed=self.sampling.seed + 1)
        return answer

    def _encode(self) -> list[int]:
        """Return the ids before the next reply, without the oldest messages if they leave no space for it."""
        first = int(bool(self.messages) and self.messages[0]["role"] == "system")
        longest = max(1, self.source.window - self.sampling.max_tokens)
        while True:
            text = self.template.render(self.messages)
            tokenizer = self.source.tokenizer
            ids = tokenizer.encode_chat(text) if isinstance(tokenizer, FileTokenizer) else tokenizer.encode(text)
            if len(ids) <= longest or len(self.messages) <= first + 2:
                return ids.tolist()
            del self.messages[first : first + 2]  # a message and its reply


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
