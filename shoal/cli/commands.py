"""Table of commands: the module, function and help text of each."""

from __future__ import annotations

from typing import Any, NamedTuple


class Command(NamedTuple):
    """One command of the command line."""

    module: str  # module of its function, imported when the command is called
    help: str  # what the command does and, after ": ", its usage
    # name of the function. It takes ``options``, an instance of a section, and ``config``, the run's `RunConfig`, if
    # the command works on a run; or ``args``, the command line. It returns the exit code.
    function: str = "run"
    config: tuple[str, ...] = ()  # sections of the run's config that the command line can set; () for all
    # values of a config without a run's file that differ from the defaults, by section
    run: dict[str, dict[str, Any]] | None = None


SMALL_RUN: dict[str, dict[str, Any]] = {
    "model": {"name": "tiny", "layers": 2, "hidden": 32, "heads": 2, "ffn": 64},
    "parallel": {"dp": 2, "zero": 1, "micro_batch": 1},
    "data": {"source": "stdlib", "tokenizer": "bytes", "sequence_length": 64},
    "train": {"steps": 12, "global_batch": 4, "validate_every": 0},
    "checkpoint": {"every": 3},
    "failover": {"heartbeat_timeout_seconds": 3, "stragglers_every": 2, "progress_timeout_seconds": 3},
}
"""A run that can be lost hundreds of times: two replicas, seconds of training, and checkpoints on disk."""

COMMANDS = {
    "train": Command(
        "shoal.cli.run.train", "Train a model: shoal train [RUN.toml] [--section.field VALUE ...]"
    ),
    "launch": Command(
        "shoal.cli.run.launch",
        "Submit a run to SLURM, Kubernetes, Ray or SkyPilot: shoal launch RUN.toml --on slurm --run-folder runs/one",
    ),
    "verify": Command(
        "shoal.cli.run.verify",
        "Prove that a layout computes what one device computes: shoal verify [RUN.toml] [--random N]",
    ),
    "sample": Command(
        "shoal.cli.run.generate", 'Generate text from a trained model: shoal sample FOLDER "def main("', "sample"
    ),
    "chat": Command("shoal.cli.run.generate", "Talk with a trained model: shoal chat FOLDER", "chat"),
    "eval": Command(
        "shoal.cli.run.eval", "Compute the loss of a trained model on a text: shoal eval FOLDER --data PATH"
    ),
    "report": Command(
        "shoal.cli.run.report",
        "Show how a run went, measured and simulated: shoal report RUN_FOLDER (shoal watch RUN OTHER compares)",
    ),
    "watch": Command(
        "shoal.cli.run.watch", "Follow runs on a local page: shoal watch RUN_FOLDER ... [--out PAGE.html]"
    ),
    "data train-tokenizer": Command(
        "shoal.cli.run.data",
        "Train a byte-pair tokenizer on the run's text: shoal data train-tokenizer [RUN.toml] --vocab-size N",
        "train_tokenizer", ("data",),
    ),
    "data inspect": Command(
        "shoal.cli.run.data", "Show what a run's data holds: shoal data inspect [RUN.toml]", "inspect", ("data",)
    ),
    "data export": Command(
        "shoal.cli.run.data",
        "Write a run's token ids as files of Megatron: shoal data export [RUN.toml] --out PREFIX", "export", ("data",),
    ),
    "import hf": Command(
        "shoal.cli.run.hugging_face",
        "Write the config of a run of a Hugging Face model: shoal import hf FOLDER --out run.toml",
        "import_hf",
    ),
    "export hf": Command(
        "shoal.cli.run.hugging_face",
        "Write a run's model as a Hugging Face folder: shoal export hf RUN_FOLDER --out FOLDER", "export_hf",
    ),
    "export gguf": Command(
        "shoal.cli.run.hugging_face",
        "Write a run's model as a file for llama.cpp: shoal export gguf RUN_FOLDER --out FILE.gguf", "export_gguf",
    ),
    "bench": Command(
        "shoal.cli.bench", "Measure shoal against torch's own implementations: shoal bench step", "main"
    ),
    "simulate": Command(
        "shoal.cli.simulate",
        "Play a pipeline schedule before it is run: shoal simulate --schedule zb-v --pp 8 --compare 1f1b,zb-h1",
    ),
    "estimate": Command(
        "shoal.cli.estimate",
        "Predict time and memory of a step: shoal estimate [RUN.toml] --cluster 8xH100 --parallel.zero 3",
        "main", ("parallel",),
    ),
    "plan": Command(
        "shoal.cli.plan",
        "Find the fastest layout for a cluster (auto: for any module): "
        "shoal plan [RUN.toml] --model llama-3-70b --cluster 64x8xH100",
    ),
    "plan auto": Command(
        "shoal.cli.plan_auto",
        "Find how to split any module, operator by operator: shoal plan auto --model tiny --cluster 4xA100 --check",
    ),
    "calibrate": Command(
        "shoal.cli.calibrate", "Measure this machine for estimates and plans: shoal calibrate --out here.toml"
    ),
    "goodput": Command("shoal.cli.goodput", "Predict goodput under failures: shoal goodput --devices 16384"),
    "validate": Command(
        "shoal.cli.validate",
        "Score estimates against published measurements: shoal validate FOLDER [--fit FILE.toml] [--out PAGE.html]",
    ),
    "explain": Command(
        "shoal.cli.explain", "Show how one thing works and what it costs: shoal explain all-reduce", "main"
    ),
    "lab": Command(
        "shoal.cli.run.lab", "Open a local page to choose and compare layouts: shoal lab [--out PAGE.html]"
    ),
    "chaos": Command(
        "shoal.cli.run.chaos",
        "Inject faults into a small run, or yours: shoal chaos [RUN.toml] --trials 50",
        run=SMALL_RUN,
    ),
    "checkpoint verify": Command(
        "shoal.cli.run.checkpoint", "Prove that a checkpoint is complete and undamaged: shoal checkpoint verify PATH",
        "verify",
    ),
    "checkpoint inspect": Command(
        "shoal.cli.run.checkpoint",
        "Show the tensors of a checkpoint and how they are split: shoal checkpoint inspect PATH", "inspect",
    ),
}  # fmt: skip
"""Commands by name, in the order of the help."""

GROUPS = {
    "data": "Text and tokenizers of a run", "checkpoint": "Proof and contents of a checkpoint",
    "export": "A run's model for transformers or llama.cpp",
}  # fmt: skip
"""First words of commands that share a line of the help."""
