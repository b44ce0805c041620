"""Conversation with a trained model, by the chat template of its tokenizer or a plain one."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from shoal.engine.data.chat import ChatTemplate, Message
from shoal.engine.data.tokenizer import FileTokenizer
from shoal.training.inference.generate import Sampling
from shoal.training.inference.sample import Show, continue_texts
from shoal.training.inference.source import ModelSource
from shoal.training.step.model_state import ModelState


class Chat:
    """A conversation.

    Args:
        system: message that comes before all others; "" for none.
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
