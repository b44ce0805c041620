"""Benchmarks of lm-evaluation-harness (Gao et al. 2024, the package ``lm_eval``) on a model of any layout.

The library asks a model three kinds of questions. `TaskModel` answers them, and knows nothing of the library.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.base.errors import UsageError, did_you_mean
from shoal.spec.config import RunConfig
from shoal.training.inference.generate import MOST_ROWS, Sampling
from shoal.training.inference.sample import continue_texts, encode_prompts
from shoal.training.inference.source import ModelSource, load_model, read_any_length
from shoal.training.step.model_state import ModelState

MAX_TOKENS = 256  # of an answer, if the task sets no limit, as the library's own models have it


class TaskModel:
    """Answers of a model to questions in text. All ranks of its layout call each method with the same questions."""

    def __init__(self, model: ModelState, source: ModelSource):
        self.model, self.source, self.window = model, source, source.window
        begin = source.tokenizer.encode("", begin=not source.is_run).tolist()
        self.prefix = begin[:1] or [source.tokenizer.end_of_document]
        """What a text without context follows."""

    def loglikelihood(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Return the log-probability [nats] of each continuation after its context, and whether it is the likeliest.

        The pair is encoded as one text. A space at the end of a context belongs to the continuation, since tokens begin
        with spaces. Of a pair that is longer than the window, the last tokens count.
        """
        return self._score([self._encode_pair(context, continuation) for context, continuation in pairs])

    def loglikelihood_rolling(self, texts: Sequence[str]) -> list[float]:
        """Return the log-probability [nats] of each text, after the token that begins a text.

        A text that is longer than the window is computed in parts. Each token is predicted once; the last part has as
        much context as the window holds.
        """
        windows = [list(self._windows(self.source.tokenizer.encode(text).tolist())) for text in texts]
        scores = iter(self._score([pair for parts in windows for pair in parts]))
        return [sum(next(scores)[0] for _ in parts) for parts in windows]

    def generate_until(self, questions: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """Return the answer to each question, up to the first of its stop texts.

        Each has settings of the library: ``until``, ``max_gen_toks``, ``do_sample``, ``temperature``, ``top_p`` and
        ``top_k``.
        """
        grouped: dict[Sampling, list[int]] = defaultdict(list)
        for i, (_, settings) in enumerate(questions):
            grouped[_read_sampling(settings)].append(i)
        answers = [""] * len(questions)
        for sampling, group in grouped.items():
            group.sort(key=lambda i: len(questions[i][0]))  # texts that are computed together are about equally long
            longest = max(1, self.window - sampling.max_tokens)
            prompts = [self._encode(questions[i][0])[-longest:] for i in group]
            for i, answer in zip(group, continue_texts(self.model, self.source, prompts, sampling), strict=True):
                answers[i] = answer
        return answers

    # ---- tokens --------------------------------------------------------------------------------------------------

    def _encode(self, text: str) -> list[int]:
        return encode_prompts(self.source, [text])[0] if text else list(self.prefix)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        if not context:
            return list(self.prefix), self.source.tokenizer.encode(continuation).tolist()
        stripped = context.rstrip()
        both, before = self._encode(context + continuation), self._encode(stripped)
        return before, both[len(before) :]

    def _windows(self, ids: list[int]) -> Iterator[tuple[list[int], list[int]]]:
        """Yield the parts of a text: context and the ids to predict."""
        first = min(self.window, len(ids))
        yield self.prefix, ids[:first]
        for start in range(first, len(ids), self.window):
            end = min(start + self.window, len(ids))
            yield ids[end - self.window - 1 : start], ids[start:end]

    # ---- computation ---------------------------------------------------------------------------------------------

    def _score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """Return `loglikelihood` of encoded pairs, computed together with pairs of about the same length."""
        rows = [(context + continuation)[-self.window - 1 :] for context, continuation in pairs]
        counts = [min(len(continuation), len(row) - 1) for (_, continuation), row in zip(pairs, rows, strict=True)]
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
        scores: list[tuple[float, bool]] = [(0.0, True)] * len(rows)
        for first in range(0, len(order), MOST_ROWS):
            group = order[first : first + MOST_ROWS]
            found = self._score_rows([rows[i] for i in group], [counts[i] for i in group])
            for i, (likelihood, greedy) in zip(group, found.tolist(), strict=True):
                scores[i] = likelihood, greedy > 0
        return scores

    @torch.no_grad()
    def _score_rows(self, rows: Sequence[list[int]], counts: Sequence[int]) -> Tensor:
        """Return [rows, 2]: the log-probability of the last ids of each row, and 1 if they are the likeliest."""
        device = self.model.mesh.device
        tokens = torch.zeros(len(rows), max(map(len, rows)) - 1, dtype=torch.int64, device=device)
        for i, row in enumerate(rows):  # filled up at the end, which no earlier token sees
            tokens[i, : len(row) - 1] = torch.tensor(row[:-1])
        logits = self.model.logits(tokens)
        found = torch.zeros(len(rows), 2, dtype=torch.float64, device=device)
        if self.model.is_last:
            for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
                own = logits[i, len(row) - 1 - count : len(row) - 1].double()  # [count, v]
                targets = torch.tensor(row[len(row) - count :], device=device)
                found[i, 0] = own.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).sum()
                found[i, 1] = (own.argmax(-1) == targets).all()
        return self.model.share(found)


def _read_sampling(settings: Mapping[str, Any]) -> Sampling:
    """Return how an answer is drawn. Without ``do_sample`` it is the likeliest."""
    until = settings.get("until") or ()
    stop = (until,) if isinstance(until, str) else tuple(until)
    sampling = Sampling(int(settings.get("max_gen_toks", MAX_TOKENS)), 0.0, stop=tuple(text for text in stop if text))
    if not settings.get("do_sample", bool(settings.get("temperature"))):
        return sampling
    return replace(
        sampling, temperature=float(settings.get("temperature", 1.0)), top_p=float(settings.get("top_p", 1.0)),
        top_k=int(settings.get("top_k", 0)),
    )


# ---- the library -----------------------------------------------------------------------------------------------------


def check_tasks(tasks: Sequence[str]) -> None:
    """Check that the library is installed and has the tasks.

    Raises:
        UsageError: it is not, or does not.
    """
    try:
        import lm_eval  # noqa: F401
    except ImportError:
        raise UsageError("--tasks needs the extra: pip install 'shoal[eval]'.") from None
    if files := [task for task in tasks if task.endswith(".yaml") and not Path(task).is_file()]:
        raise UsageError(f"--tasks: no such file: {files[0]}")
    if names := [task for task in tasks if not task.endswith(".yaml")]:
        known = _task_manager(tasks).all_tasks
        for name in names:
            if name not in known:
                raise UsageError(f"--tasks: no task '{name}'; {did_you_mean(name, known)}")


def _task_manager(tasks: Sequence[str]) -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager(include_defaults=not all(task.endswith(".yaml") for task in tasks))


def run_tasks_on_rank(
    source: ModelSource, config: RunConfig, tasks: Sequence[str], limit: int | None, shots: int | None
) -> dict[str, dict[str, Any]]:
    """Load a model on this rank of the config's layout, and return the metrics of tasks by name. Collective.

    Every rank asks all questions, in the same order, and computes its part of the model.
    """
    from lm_eval import simple_evaluate
    from lm_eval.api.model import LM

    model = load_model(source, config)
    read_any_length(model)
    answers = TaskModel(model, source)

    class HarnessModel(LM):
        """Passes the library's questions on."""

        def loglikelihood(self, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
            return answers.loglikelihood([each.args for each in requests])

        def loglikelihood_rolling(self, requests: list[Any], **_: Any) -> list[float]:
            return answers.loglikelihood_rolling([each.args[0] for each in requests])

        def generate_until(self, requests: list[Any], **_: Any) -> list[str]:
            return answers.generate_until([each.args for each in requests])

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    found = simple_evaluate(
        model=HarnessModel(), tasks=[str(Path(task).absolute()) if task.endswith(".yaml") else task for task in tasks],
        task_manager=_task_manager(tasks), limit=limit, num_fewshot=shots, log_samples=False, bootstrap_iters=0,
    )
    return {name: dict(metrics) for name, metrics in found["results"].items()}
