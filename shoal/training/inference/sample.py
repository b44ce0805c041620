"""Continue texts: encode prompts, generate, and decode up to the end of each text."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from shoal.base.errors import UsageError
from shoal.base.terminal import quote
from shoal.engine.checkpoint import list_checkpoints
from shoal.engine.data.batches import Dataset
from shoal.engine.data.tokenizer import Tokenizer
from shoal.spec.catalog import ModelShape
from shoal.spec.config import RunConfig
from shoal.spec.layout import Layout
from shoal.training.inference.generate import Sampling, generate
from shoal.training.inference.source import ModelSource, load_model, open_source, read_any_length
from shoal.training.run_folder import get_checkpoint_folder
from shoal.training.step.model_state import ModelState

Show = Callable[[str], object]
"""Callback that gets a text piece by piece, as soon as each piece is certain."""

SAMPLED_PARAMETERS = 1_000_000_000  # of a run's model; a larger one may not fit into one host
LONGEST_PROMPT = 60  # characters
PROMPTS = 8  # samples that may give a prompt: the first may have no words
UNDECODED = "\ufffd"  # at the end of a text: the first bytes of a character


class Continuation:
    """Text of one generated sequence, which ends at an end id or a stop text.

    Args:
        prompt: the ids before it. They are decoded with it, as a tokenizer may treat a text's first token differently.
        stop: texts that end it; it does not include them.

    Attributes:
        text: what was generated, as far as it was decoded.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], ends: frozenset[int], stop: Sequence[str] = (),
        show: Show | None = None,
    ):
        self.tokenizer, self.ids, self.ends, self.stop, self.show = tokenizer, list(prompt), ends, stop, show
        self._before = tokenizer.decode(prompt)
        self.text, self._ended, self._shown = "", False, 0

    def take(self, token: int) -> bool:
        """Add an id; return whether the text continues."""
        if token in self.ends:
            return False
        self.ids.append(token)
        if self.stop or self.show:  # else it is decoded once, at the end
            self._decode()
            self._show(self._certain())
        return not self._ended

    def finish(self) -> str:
        """Return the text, and show the rest of it."""
        if not self._ended:
            self._decode()
        self._show(len(self.text))
        return self.text

    def _decode(self) -> None:
        self.text = self.tokenizer.decode(self.ids).removeprefix(self._before)
        if found := [at for stop in self.stop if (at := self.text.find(stop)) >= 0]:
            self.text, self._ended = self.text[: min(found)], True

    def _certain(self) -> int:
        """Return the length of the text that no further token changes or ends."""
        if self._ended:
            return len(self.text)
        certain = len(self.text.rstrip(UNDECODED))
        beginnings = {stop[:n] for stop in self.stop for n in range(1, len(stop))}
        return min([len(self.text) - len(b) for b in beginnings if self.text.endswith(b)], default=certain)

    def _show(self, length: int) -> None:
        if self.show and length > self._shown:
            self.show(self.text[self._shown : length])
            self._shown = length


def continue_texts(
    model: ModelState, source: ModelSource, prompts: Sequence[Sequence[int]], sampling: Sampling,
    show: Show | None = None,
) -> list[str]:
    """Return the continuation of each prompt, without it. Collective.

    Args:
        show: gets the continuation of the only prompt while it is generated.
    """
    texts = [Continuation(source.tokenizer, prompt, source.ends, sampling.stop, show) for prompt in prompts]
    generate(model, prompts, sampling, window=source.window, take=lambda row, token: texts[row].take(token))
    return [text.finish() for text in texts]


def encode_prompts(source: ModelSource, prompts: Sequence[str]) -> list[list[int]]:
    """Return the ids of prompts; of an imported model, with the ids that its tokenizer begins a text with.

    Raises:
        UsageError: a prompt is empty.
    """
    if not prompts or not all(prompts):
        raise UsageError("the prompt is empty; give at least one character.")
    found = [source.tokenizer.encode(prompt, begin=not source.is_run).tolist() for prompt in prompts]
    return [ids[:-1] if ids[-1] in source.ends else ids for ids in found]  # a tokenizer may also end a text


def sample_on_rank(
    source: ModelSource, config: RunConfig, prompts: Sequence[str], sampling: Sampling, show: Show | None = None
) -> list[str]:
    """Load a model on this rank of the config's layout, and return each prompt with its continuation. Collective."""
    model = load_model(source, config)
    read_any_length(model)
    texts = continue_texts(model, source, encode_prompts(source, prompts), sampling, show)
    return [prompt + text for prompt, text in zip(prompts, texts, strict=True)]


def find_words(text: str) -> str:
    """Return up to four words with which a line of a text begins; "" if no line has a letter.

    The text may begin and end inside a line or a character.

    >>> find_words("f the sea.\\nIt was a bright cold day in April")
    'It was a bright'
    """
    lines = (text.partition("\n")[2] or text.partition(" ")[2] or text).strip(UNDECODED).splitlines()
    line = next((line for line in lines if any(map(str.isalpha, line))), "")
    return " ".join(line.split()[:4])[:LONGEST_PROMPT]


def sample_run(
    folder: Path, config: RunConfig, shape: ModelShape, held_out: Dataset, note: Callable[[str], object]
) -> tuple[str, str]:
    """Return a prompt and the text that a run's saved model generates after it, in this process.

    Args:
        held_out: the run's data for validation, from which the prompt is taken unless `metrics.sample_prompt` gives it.
        note: called with the reason if no text is generated; both texts are then empty.
    """
    given = config.metrics.sample_prompt
    if config.model.module:
        for _, path in list_checkpoints(get_checkpoint_folder(config, folder))[-1:]:
            note(f"the weights: shoal.load_checkpoint({str(path)!r}, prefix='model.')")
    elif given == "":
        pass
    elif shape.experts is not None and shape.experts.gate == "expert-choice":
        note("no sample: expert-choice routing needs complete sequences, not one token at a time")
    elif shape.parameters() > SAMPLED_PARAMETERS:
        note(f"generate text with: shoal sample {quote(folder)} {shlex.quote(given or 'TEXT')}")
    else:
        try:
            source = open_source(folder)
            texts = (source.tokenizer.decode(held_out.batch([i]).tokens[0].tolist()) for i in range(PROMPTS))
            if prompt := given or next(filter(None, map(find_words, texts)), ""):
                one_device = source.on(Layout(), train={"precision": "fp32", "device": "cpu"})
                sampling = Sampling(max_tokens=160, temperature=0.7, seed=config.train.seed)
                [text] = sample_on_rank(source, one_device, [prompt], sampling)
                return prompt, text.removeprefix(prompt)
        except UsageError as error:  # the run is complete and saved, even if its files have changed since
            note(f"no sample: {error}")
    return "", ""
