"""The table of commands: where the function of each one is, and what the help says of it."""

from __future__ import annotations

from typing import NamedTuple


class Command(NamedTuple):
    """One command of the command line.

    Attributes:
        module: has its function; it is imported when the command is called.
        function: takes the command's options and returns an exit code. With a config it takes the run's `RunConfig`
            too; without options it takes the words of the command line and reads them itself.
        help: what the command does and, after ": ", how it is called.
        options: the name of its options class in the module; "" for none.
        config: the sections of the run's config that the command line can set, or "all"; () if it takes no run.
    """

    module: str
    function: str
    help: str
    options: str = ""
    config: tuple[str, ...] | str = ()


COMMANDS: dict[str, Command] = {
    "train": Command(
        "shoal.cli.run.train", "run", "Train a model: shoal train [RUN.toml] [--section.field VALUE ...]",
        "TrainOptions", "all",
    ),
    "verify": Command(
        "shoal.cli.run.verify", "run",
        "Prove that a layout computes what one device computes: shoal verify [RUN.toml] [--random N]",
        "VerifyOptions", "all",
    ),
    "sample": Command(
        "shoal.cli.run.sample", "run", 'Let a trained model write: shoal sample RUN_FOLDER "def main("',
        "SampleOptions",
    ),
    "report": Command(
        "shoal.cli.run.report", "run", "Show how a run went, measured and simulated: shoal report RUN",
        "ReportOptions",
    ),
    "data train-tokenizer": Command(
        "shoal.cli.run.data", "train_tokenizer",
        "Train a byte-pair tokenizer on the run's text: shoal data train-tokenizer [RUN.toml] --vocab-size N",
        "TokenizerOptions", ("data",),
    ),
    "data inspect": Command(
        "shoal.cli.run.data", "inspect", "Show what a run's data holds: shoal data inspect [RUN.toml]",
        "InspectOptions", ("data",),
    ),
    "bench": Command(
        "shoal.cli.bench", "main", "Measure shoal against torch's own implementations: shoal bench step",
    ),
    "simulate": Command(
        "shoal.cli.simulate", "run",
        "Play a pipeline schedule before it is run: shoal simulate --schedule zb-v --pp 8 --compare 1f1b,zb-h1",
        "SimulateOptions",
    ),
    "estimate": Command(
        "shoal.cli.estimate", "main", "Say what a step needs, before it is run: shoal estimate --cluster 8xH100",
    ),
    "plan": Command(
        "shoal.cli.plan", "run",
        "Find the fastest layout for a cluster: shoal plan --model llama-3-70b --cluster 64x8xH100",
        "PlanOptions",
    ),
    "plan auto": Command(
        "shoal.cli.plan_auto", "run",
        "Find how to split any module, operator by operator: shoal plan auto --model tiny --cluster 4xhere --check",
        "AutoOptions",
    ),
    "calibrate": Command(
        "shoal.cli.calibrate", "run",
        "Measure this machine for estimates and plans: shoal calibrate --out here.toml",
        "CalibrateOptions",
    ),
    "goodput": Command(
        "shoal.cli.goodput", "run", "Say how much of a long training counts: shoal goodput --devices 16384",
        "GoodputOptions",
    ),
    "validate": Command(
        "shoal.cli.validate", "validate",
        "Score estimates against published measurements: shoal validate FOLDER [--fit FILE.toml] [--out PAGE.html]",
        "ValidateOptions",
    ),
    "explain": Command(
        "shoal.cli.explain", "main", "Show how one thing works and what it costs: shoal explain all-reduce",
    ),
    "chaos": Command(
        "shoal.cli.run.chaos", "run",
        "Do to a run all that can happen, and see what is lost: shoal chaos [RUN.toml] --trials 50",
        "ChaosOptions", "all",
    ),
    "checkpoint verify": Command(
        "shoal.cli.run.checkpoint", "verify",
        "Prove that a checkpoint is complete and undamaged: shoal checkpoint verify PATH",
        "CheckpointOptions",
    ),
    "checkpoint inspect": Command(
        "shoal.cli.run.checkpoint", "inspect",
        "Show what tensors a checkpoint holds, and how cut: shoal checkpoint inspect PATH",
        "CheckpointOptions",
    ),
}  # fmt: skip
"""By the words that name them, in the order of the help."""
