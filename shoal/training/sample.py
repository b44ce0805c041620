"""Generate text from a checkpoint of any layout, on one device."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from shoal.base.addresses import AnyPath
from shoal.base.boxes import Box, Piece
from shoal.base.errors import UsageError
from shoal.base.terminal import warn
from shoal.engine.checkpoint import CheckpointError, load, newest_good
from shoal.engine.checkpoint.manifest import Committed
from shoal.engine.data.tokenizer import Tokenizer, load_tokenizer
from shoal.engine.models.cache import Slice
from shoal.engine.models.experts.router import Router, find_modules
from shoal.engine.models.transformer import Transformer
from shoal.spec.catalog import ModelShape
from shoal.spec.config import RUN_FILE, RunConfig, load_config
from shoal.training.run_folder import get_checkpoint_folder, with_own_tokenizer


def sample(
    run_folder: str | Path, prompt: str, *, tokens: int = 200, temperature: float = 0.8, seed: int = 0
) -> str:
    """Continue a prompt with the newest good checkpoint of a run. Newer damaged checkpoints are listed on stderr.

    Args:
        tokens: maximum number of tokens to generate; generation also stops at the end of a document.
        temperature: sampling temperature; 0 takes the most likely token.

    Returns:
        The prompt and its continuation.

    Raises:
        UsageError: the folder has no run or no good checkpoint, or the prompt is empty.

    >>> import shoal
    >>> shoal.sample("runs/example", "def main(", tokens=5, seed=1).startswith("def main(")
    True
    """
    config, shape, tokenizer = describe_run(run_folder)
    start = tokenizer.encode(prompt).tolist()
    if not start:
        raise UsageError("the prompt is empty; give at least one character.")
    found = find_good_checkpoint(config, run_folder)
    if shape.experts is not None and shape.experts.gate == "expert-choice":
        raise UsageError(f"{run_folder}: its experts choose among all tokens of a sequence, also later ones, so it "
                         "cannot generate one token after another.")
    model = load_model(found.path, shape)
    for router in find_modules(model, Router):  # capacity is a fraction of a full sequence, which this is not yet
        router.experts = router.experts.model_copy(update={"capacity_factor": 0.0})
    generator = torch.Generator().manual_seed(seed)
    ids = generate(
        model, torch.tensor(start), tokens, temperature=temperature, window=config.data.sequence_length,
        stop=tokenizer.end_of_document, generator=generator,
    )
    return tokenizer.decode(ids.tolist())


def describe_run(run_folder: str | Path) -> tuple[RunConfig, ModelShape, Tokenizer]:
    """Return the config of a run, its model and its tokenizer; raise `UsageError` without a run in the folder."""
    if not (file := Path(run_folder, RUN_FILE)).is_file():
        raise UsageError(f"{run_folder} is not the folder of a run ({RUN_FILE} is missing).")
    config = with_own_tokenizer(load_config(file), Path(run_folder))
    if config.model.module:
        raise UsageError("a run with model.module generates no text.\n  Load its weights: "
                         "shoal.load_checkpoint.")
    tokenizer = load_tokenizer(config.data.tokenizer)
    shape = config.model.shape(vocab=tokenizer.vocab_size, sequence_length=config.data.sequence_length)
    return config, shape, tokenizer


def find_good_checkpoint(config: RunConfig, run_folder: str | Path) -> Committed:
    """Return the newest good checkpoint of a run, and print the damaged ones that are newer.

    Raises:
        CheckpointError: there is none.
    """
    found, refused = newest_good(get_checkpoint_folder(config, Path(run_folder)))
    for error in refused:
        warn(f"checkpoint refused: {error}")
    if found is None:
        raise CheckpointError(f"{run_folder} has no good checkpoint.")
    return found


def load_model(path: AnyPath, shape: ModelShape) -> Transformer:
    """Load the full model on the CPU, in float32, from a checkpoint of any layout."""
    with torch.device("meta"):
        model = Transformer(shape)
    model.to_empty(device="cpu")
    if shape.tied:
        assert model.head is not None and model.embed is not None  # the full model has both
        model.head.weight = model.embed.token.weight
    state = {
        f"model.{name}": [Piece(tuple(p.shape), Box.full(tuple(p.shape)), p.data)]
        for name, p in chain(model.named_parameters(), model.named_buffers())
    }
    unwanted = ("optimizer.", "precision.", "relaxed.", "replica.")
    load(path, state, model=shape.model_dump(mode="json"), convert=True, ignore_prefixes=unwanted)
    return model.eval()


@torch.no_grad()
def generate(
    model: Transformer,
    tokens: Tensor,
    count: int,
    *,
    temperature: float,
    window: int,
    stop: int,
    generator: torch.Generator,
) -> Tensor:
    """Continue a sequence token by token, with a key/value cache.

    Args:
        tokens: [s] ids to continue.
        count: maximum number of tokens to add.
        window: maximum context length. When it is full, its second half is recomputed as the new context.
        stop: id that ends the text.

    Returns:
        [s + count] ids, or fewer if ``stop`` is drawn.
    """
    seen = Slice()
    new = tokens[-window:]
    for _ in range(count):
        if seen.stop + len(new) > window:
            seen, new = Slice(), tokens[-max(1, window // 2) :]
        seen = Slice(seen)
        logits = model(new.unsqueeze(0), part=seen)[0, -1].double()
        if temperature == 0:
            following = logits.argmax()
        else:
            likely = ((logits - logits.max()) / temperature).softmax(-1)  # finite for any temperature
            following = torch.multinomial(likely, 1, generator=generator)[0]
        if int(following) == stop:
            break
        new = following.view(1)
        tokens = torch.cat((tokens, new))
    return tokens
