"""Use a trained model on the ranks of a layout: this process for one rank, local processes for more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from shoal.base.errors import UsageError
from shoal.engine.data.batches import open_complete
from shoal.engine.data.chat import ChatTemplate
from shoal.engine.device import pick_device, tune_process
from shoal.launch.worker_pool import Pool, RankError
from shoal.spec.config import RunConfig
from shoal.spec.layout import Layout
from shoal.training.inference.chat import Chat
from shoal.training.inference.evaluate import Evaluation, choose_text, evaluate_on_rank
from shoal.training.inference.generate import Sampling
from shoal.training.inference.harness import check_tasks, run_tasks_on_rank
from shoal.training.inference.sample import Show, encode_prompts, sample_on_rank
from shoal.training.inference.source import ModelSource, check_generates, load_model, open_source, read_any_length

T = TypeVar("T")
MICRO_BATCH = 8  # sequences of a forward pass in an evaluation
LONGEST_SECONDS = 30 * 86400.0  # of one call: as long as it takes


def sample(
    folder: str | Path,
    prompts: str | Sequence[str],
    *,
    max_tokens: PositiveInt = 200,
    temperature: NonNegativeFloat = 0.8,
    top_p: float = 1.0,
    top_k: NonNegativeInt = 0,
    stop: Sequence[str] = (),
    seed: int = 0,
    tp: PositiveInt = 1,
    pp: PositiveInt = 1,
    precision: str = "fp32",
    device: str = "cpu",
    show: Show | None = None,
) -> list[str]:
    """Continue prompts with the newest good checkpoint of a run, or with a model in Hugging Face's format.

    Args:
        folder: the run folder, or the folder of the model.
        prompts: one text or several, which are continued together. Each is drawn as if it were alone.
        max_tokens: maximum number of tokens to generate; generation also stops at the end of a document.
        temperature, top_p, top_k, stop, seed: see `shoal.training.inference.generate.Sampling`.
        tp, pp: tensor-parallel and pipeline ranks, for a model that does not fit on one device.
        precision: number formats, as ``train.precision`` of a run.
        device: "cpu", "cuda" or "auto" (CUDA if available).
        show: gets the text of the only prompt, piece by piece, while it is generated on one rank.

    Returns:
        Each prompt with its continuation.

    Raises:
        UsageError: the folder has no model or no good checkpoint, a prompt is empty, or the layout does not fit.

    >>> import shoal
    >>> shoal.sample("runs/example", "def main(", max_tokens=5, seed=1)[0].startswith("def main(")
    True
    """
    prompts = [prompts] if isinstance(prompts, str) else list(prompts)
    source = open_source(folder)
    encode_prompts(source, prompts)  # before processes start
    check_generates(source, folder)
    config = source.on(Layout(tp=tp, pp=pp), train={"precision": precision, "device": device})
    sampling = Sampling(max_tokens, temperature, top_p, top_k, tuple(stop), seed)
    streams = show if len(prompts) == 1 and config.parallel.world_size == 1 else None
    if streams:
        streams(prompts[0])
    texts = call_on_ranks(sample_on_rank, source, config, prompts, sampling, streams)
    if show and not streams:
        show("\n--------\n".join(texts))
    return texts


def open_chat(
    folder: str | Path,
    *,
    system: str = "",
    max_tokens: PositiveInt = 500,
    temperature: NonNegativeFloat = 0.8,
    top_p: float = 1.0,
    top_k: NonNegativeInt = 0,
    stop: Sequence[str] = (),
    seed: int = 0,
    precision: str = "fp32",
    device: str = "cpu",
) -> Chat:
    """Load a trained model for a conversation, on one device.

    Args:
        folder: a run folder, or the folder of a model in Hugging Face's format. The chat template is that of the
            model, or a plain one.
        system: message before all others.
        max_tokens, temperature, top_p, top_k, stop, seed, precision, device: see `sample`.

    Raises:
        UsageError: there is no model, or its chat template is not valid.

    >>> import shoal
    >>> chat = shoal.open_chat("runs/example", max_tokens=5)
    >>> chat.reply("What is a fish?") == chat.messages[-1]["content"]
    True
    """
    source = open_source(folder)
    check_generates(source, folder)
    folders = [Path(folder).expanduser(), *filter(None, [source.config.model.weights])]
    template = ChatTemplate.find(folders)
    sampling = Sampling(max_tokens, temperature, top_p, top_k, tuple(stop), seed)
    model = load_model(source, source.on(Layout(), train={"precision": precision, "device": device}))
    read_any_length(model)
    return Chat(model, source, template, sampling, system)


def evaluate(
    folder: str | Path,
    data: str | Path | Sequence[str | Path] = (),
    *,
    field: str | None = None,
    chat: bool | None = None,
    layout: Layout | None = None,
    sequences: PositiveInt | None = None,
    sequence_length: PositiveInt | None = None,
    precision: str | None = None,
    device: str = "cpu",
) -> Evaluation:
    """Compute the loss of a trained model on a text. Documents are packed, and masked, as in its training.

    Args:
        folder: a run folder, or the folder of a model in Hugging Face's format.
        data: a file, folder or glob of text, or several (default: the documents that the run held out for validation).
        field: field of JSON lines and Parquet with the text (default: the run's `data.field`; "text" for an imported
            model).
        chat: the text is conversations, of which only the assistant's tokens count, as with `data.chat` (default: the
            run's).
        layout: split of the work (default: one process). Every layout computes the same loss.
        sequences: evaluate only this many sequences from the start of the text, or of each source of a mixture.
        sequence_length: tokens per sequence (default: the run's).
        precision: number formats (default: the run's; fp32 for an imported model).
        device: "cpu", "cuda" or "auto" (CUDA if available).

    Raises:
        UsageError: there is no model or no text, or the layout does not fit.

    >>> import shoal
    >>> from pathlib import Path
    >>> size = Path("held-out.txt").write_text("one fish, two fish, red fish, blue fish")
    >>> found = shoal.evaluate("runs/example", "held-out.txt")
    >>> found.tokens, found.bytes, 5 < found.loss < 6
    (39, 39, True)
    """
    source = open_source(folder)
    paths = [data] if isinstance(data, str | Path) else data
    text = choose_text(source, tuple(map(str, paths)), sequence_length, field, chat)
    train = {"device": device} | ({"precision": precision} if precision else {})
    config = source.on(layout or Layout(micro_batch=MICRO_BATCH), data=dict(text), train=train)
    for part in config.data.sources().values():
        open_complete(part, progress=True)  # before processes start
    return call_on_ranks(evaluate_on_rank, source, config, sequences)


def evaluate_tasks(
    folder: str | Path,
    tasks: str | Sequence[str],
    *,
    tp: PositiveInt = 1,
    pp: PositiveInt = 1,
    limit: PositiveInt | None = None,
    shots: int | None = None,
    precision: str | None = None,
    device: str = "cpu",
) -> dict[str, dict[str, Any]]:
    """Evaluate a trained model on tasks of lm-evaluation-harness, which needs the extra ``shoal[eval]``.

    Args:
        folder: a run folder, or the folder of a model in Hugging Face's format.
        tasks: one or several names of the library's tasks, or files (.yaml) of own ones. A file can name code, which
            is run.
        tp, pp: tensor-parallel and pipeline ranks, which answer each question together.
        limit: questions of each task (default: all).
        shots: solved examples before each question (default: the task's).
        precision: number formats (default: the run's; fp32 for an imported model).
        device: "cpu", "cuda" or "auto" (CUDA if available).

    Returns:
        The library's metrics of each task, by name.

    Raises:
        UsageError: there is no model, no such task, or the library is missing.

    >>> import shoal
    >>> shoal.evaluate_tasks("runs/example", "no-such-file.yaml")
    Traceback (most recent call last):
    shoal.base.errors.UsageError: --tasks ...
    """
    tasks = [tasks] if isinstance(tasks, str) else tasks
    source = open_source(folder)
    check_generates(source, folder)
    check_tasks(tasks)
    train = {"device": device} | ({"precision": precision} if precision else {})
    config = source.on(Layout(tp=tp, pp=pp), train=train)
    return call_on_ranks(run_tasks_on_rank, source, config, list(tasks), limit, shots)


def call_on_ranks(function: Callable[..., T], source: ModelSource, config: RunConfig, *args: Any) -> T:
    """Call a function of a model on every rank of a config's layout, and return the first rank's value.

    Raises:
        UsageError: a rank failed; the message has its reason.
    """
    ranks = config.parallel.world_size
    device = pick_device(config.train.device, setting="device").type
    if ranks == 1:
        return function(source, config, *args)
    with Pool(ranks, partial(tune_process, products=device == "cpu"), device=device) as pool:
        try:
            return pool.run(function, ranks, source, config, *args, timeout=LONGEST_SECONDS)[0]
        except RankError as error:
            rank, _ = error.failures[0]
            raise UsageError(f"rank {rank} of {ranks} failed: {error.reason}") from error
