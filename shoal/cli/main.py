"""The command line: `shoal COMMAND`, one function each. What a command does lives in its own room, imported on use.

Commands that take a run show every field of `RunConfig` as an option; the values of its TOML file are the defaults.
The same validation as for the file refuses what cannot be, in the same words. Its sections are imported on use too:
they take longer to make than an estimate.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from shoal.base.errors import UsageError, did_you_mean, of_system, redact
from shoal.base.files import read_toml
from shoal.base.options import defaults, read
from shoal.base.section import Section, validate
from shoal.base.terminal import print_what_can_be

if TYPE_CHECKING:
    from pydantic import BaseModel

    from shoal.spec.config import RunConfig

T = TypeVar("T", bound=Section)
_SEEN_ENOUGH = 141  # what a shell calls a command that SIGPIPE ended


def train(args: list[str]) -> int:
    """Train a model: shoal train [RUN.toml] [--section.field VALUE ...]"""
    from shoal.cli.options import TrainOptions

    options, config = parse("train", TrainOptions, _resume_value(args))
    from shoal.cli.train import train

    if options.profile:
        config = config.model_copy(update={"metrics": config.metrics.model_copy(update={"profile": True})})
    return train(
        config, ranks=options.ranks, run_folder=options.run_folder, resume=options.resume,
        keep_going=options.keep_going,
    )


def verify(args: list[str]) -> int:
    """Prove that a layout computes what one device computes: shoal verify [RUN.toml] [--random N]"""
    from shoal.cli.options import VerifyOptions

    options, config = parse("verify", VerifyOptions, args)
    from shoal.cli.verify import verify

    own = options.precision == "own"
    return verify(
        config, random=options.random, rule=options.rule, steps=options.steps, own_precision=own, plant=options.plant
    )


def sample(args: list[str]) -> int:
    """Let a trained model write: shoal sample RUN_FOLDER "def main(" """
    from shoal.cli.options import SampleOptions

    options = parse_own("sample", SampleOptions, args)
    from shoal.training.sample import sample_run

    return sample_run(
        options.run_folder,
        options.prompt,
        tokens=options.tokens,
        temperature=options.temperature,
        seed=options.seed,
    )


def report(args: list[str]) -> int:
    """Show how a run went, measured and simulated: shoal report RUN"""
    from shoal.cli.options import ReportOptions

    options = parse_own("report", ReportOptions, args)
    from shoal.cli.report import report

    report(options.run_folder, options.out)
    return 0


def data_train_tokenizer(args: list[str]) -> int:
    """Train a byte-pair tokenizer on the run's text: shoal data train-tokenizer [RUN.toml] --vocab-size N"""
    from shoal.cli.options import TokenizerOptions

    options, config = parse("data train-tokenizer", TokenizerOptions, args, sections=("data",))
    from shoal.engine.data.prepare import train_tokenizer

    train_tokenizer(config.data, options.vocab_size, options.out)
    return 0


def data_inspect(args: list[str]) -> int:
    """Show what a run's data holds: shoal data inspect [RUN.toml]"""
    _, config = parse("data inspect", Section, args, sections=("data",))
    from shoal.engine.data.prepare import inspect

    inspect(config.data)
    return 0


def bench(args: list[str]) -> int:
    """Measure shoal against torch's own implementations: shoal bench step"""
    from shoal.cli.bench.main import main

    return main(args)


def explain(args: list[str]) -> int:
    """Show how one thing works and what it costs: shoal explain all-reduce"""
    from shoal.cli.explain import main

    return main(args)


def simulate(args: list[str]) -> int:
    """Play a pipeline schedule before it is run: shoal simulate --schedule zb-v --pp 8 --compare 1f1b,zb-h1"""
    from shoal.cli.simulate import SimulateOptions, run

    options = parse_own("simulate", SimulateOptions, args)
    return run(options)


def estimate(args: list[str]) -> int:
    """Say what a step needs, before it is run: shoal estimate --cluster 8xH100"""
    from shoal.cli.estimate import EstimateOptions, run

    fill = not _gives("parallel", "dp", args)
    if _run_file(args)[0]:
        options, config = parse("estimate", EstimateOptions, args, sections=("parallel",))
        return run(options, config, config.parallel, fill=fill)
    from shoal.spec.layout import Layout

    options, given = _read("estimate", EstimateOptions, args, {"parallel": Layout}, {"parallel": defaults(Layout)})
    layout = validate(Layout, given["parallel"], where="command line", within="parallel")
    return run(options, None, layout, fill=fill)


def validate_estimates(args: list[str]) -> int:
    """Score estimates against published measurements: shoal validate FOLDER [--fit FILE.toml] [--out PAGE.html]"""
    from shoal.cli.validate import ValidateOptions
    from shoal.cli.validate import validate as command

    options = parse_own("validate", ValidateOptions, args)
    return command(options)


def plan(args: list[str]) -> int:
    """Find the fastest layout for a cluster: shoal plan --model llama-3-70b --cluster 64x8xH100"""
    from shoal.cli.plan import PlanOptions, run

    options = parse_own("plan", PlanOptions, args)
    return run(options)


def plan_auto(args: list[str]) -> int:
    """Find how to split any module, operator by operator: shoal plan auto --model tiny --cluster 4xhere --check"""
    from shoal.cli.plan_auto import AutoOptions, run

    options = parse_own("plan auto", AutoOptions, args)
    return run(options)


def calibrate(args: list[str]) -> int:
    """Measure this machine for estimates and plans: shoal calibrate --out here.toml"""
    from shoal.cli.calibrate import CalibrateOptions, run

    options = parse_own("calibrate", CalibrateOptions, args)
    return run(options)


def goodput(args: list[str]) -> int:
    """Say how much of a long training counts: shoal goodput --devices 16384"""
    from shoal.cli.goodput import GoodputOptions, run

    options = parse_own("goodput", GoodputOptions, args)
    return run(options)


def chaos(args: list[str]) -> int:
    """Do to a run all that can happen, and see what is lost: shoal chaos [RUN.toml] --trials 50"""
    from shoal.cli.chaos import ChaosOptions, run

    options, config = parse("chaos", ChaosOptions, args)
    return run(options, config)


def checkpoint_verify(args: list[str]) -> int:
    """Prove that a checkpoint is complete and undamaged: shoal checkpoint verify PATH"""
    from shoal.cli.options import CheckpointOptions

    options = parse_own("checkpoint verify", CheckpointOptions, args)
    from shoal.engine.checkpoint import verify
    from shoal.engine.checkpoint.storage import place

    verify(place(options.path))
    print(f"{options.path}: complete and undamaged")
    return 0


def checkpoint_inspect(args: list[str]) -> int:
    """Show what tensors a checkpoint holds, and how cut: shoal checkpoint inspect PATH"""
    from shoal.cli.options import CheckpointOptions

    options = parse_own("checkpoint inspect", CheckpointOptions, args)
    from shoal.engine.checkpoint.storage import place
    from shoal.engine.checkpoint.table import inspect

    inspect(place(options.path))
    return 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": train,
    "verify": verify,
    "sample": sample,
    "report": report,
    "data train-tokenizer": data_train_tokenizer,
    "data inspect": data_inspect,
    "bench": bench,
    "simulate": simulate,
    "estimate": estimate,
    "plan": plan,
    "plan auto": plan_auto,
    "calibrate": calibrate,
    "goodput": goodput,
    "validate": validate_estimates,
    "explain": explain,
    "chaos": chaos,
    "checkpoint verify": checkpoint_verify,
    "checkpoint inspect": checkpoint_inspect,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 refuted or failed, 2 bad input, 130 interrupted, 141 nobody
    reads what it prints."""
    args = list(sys.argv[1:] if argv is None else argv)
    print_what_can_be()
    try:
        if not args or args[0] in ("-h", "--help"):
            print(_usage())
            return 0
        command, rest = _command(args)
        code = command(rest)
        sys.stdout.flush()
        return code
    except UsageError as error:
        return _refuse(error)
    except OSError as error:
        return _SEEN_ENOUGH if isinstance(error, BrokenPipeError) and _unread() else _refuse(of_system(error))
    except KeyboardInterrupt:
        return 130


def _unread() -> bool:
    """Whether nobody reads what is printed any more, as in `shoal estimate | head`; if so, no more is."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    if not any(event & select.POLLERR for _, event in output.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def _refuse(error: UsageError) -> int:
    print(f"shoal: error: {redact(str(error))}", file=sys.stderr)
    return 2


def _usage() -> str:
    lines = ["shoal: train one transformer language model on many devices, moving as one", ""]
    for name, command in COMMANDS.items():
        what, _ = (command.__doc__ or "").strip().split(": shoal ", 1)
        lines.append(f"  {name:<22}{what}")
    return "\n".join([*lines, "", "shoal COMMAND --help shows how to call it and its options, with their defaults."])


def _command(args: list[str]) -> tuple[Callable[[list[str]], int], list[str]]:
    """The command that the first word or two name, and the arguments left to it."""
    for words in (2, 1):
        if (name := " ".join(args[:words])) in COMMANDS:
            return COMMANDS[name], args[words:]
    group = [name for name in COMMANDS if name.startswith(f"{args[0]} ")]
    if group and (len(args) == 1 or args[1] in ("-h", "--help")):
        raise UsageError(f"'{args[0]}' needs one of: {', '.join(name.split()[1] for name in group)}")
    given = " ".join(args[:2]) if group else args[0]
    raise UsageError(f"there is no command '{given}'; {did_you_mean(given, group or COMMANDS)}")


# ---- options --------------------------------------------------------------------------------------------------------


def parse(
    command: str, options: type[T], args: list[str], sections: Sequence[str] | None = None
) -> tuple[T, RunConfig]:
    """A command's own options and the run's config: defaults, then the TOML file, then the command line.

    Args:
        command: its name, for the help.
        options: what it takes besides the config.
        args: the command line behind the name. A run's TOML file is its first word, or the first that ends in .toml.
        sections: those of the config that can be set (default: all).

    Raises:
        UsageError: the file is missing or wrong, an option does not exist (the nearest is named), or a value cannot be
            read or is out of its range.
        SystemExit: 0, after ``--help``.
    """
    from shoal.spec.config import RunConfig, load_config

    file, args = _run_file(args)
    base = (load_config(file) if file else RunConfig()).model_dump()
    kinds = {name: RunConfig.model_fields[name].annotation for name in sections or RunConfig.model_fields}
    own, given = _read(command, options, args, kinds, {name: base[name] for name in kinds})
    return own, validate(RunConfig, base | given, where="command line")


def parse_own(command: str, options: type[T], args: list[str]) -> T:
    """The options of a command that takes no run; arguments and errors as `parse` has them."""
    return _read(command, options, args, {}, {})[0]


def _read(
    command: str, options: type[T], args: list[str], sections: dict[str, type[BaseModel]], default: dict[str, Any]
) -> tuple[T, dict[str, dict[str, Any]]]:
    """A command's own options, and unchecked values of sections."""
    given = read(
        f"shoal {command}", COMMANDS[command].__doc__ or "",
        {"": options, **sections}, {"": defaults(options), **default}, args,
    )
    return validate(options, given.pop(""), where="command line"), given


def _run_file(args: list[str]) -> tuple[Path | None, list[str]]:
    """Take the run's TOML file out of the arguments."""
    for i, word in enumerate(args):
        option = word.startswith("-") or args[i - 1 : i] == ["--catalog"]  # whose value is a TOML file too
        if not option and (word.endswith(".toml") or i == 0):
            return Path(word), args[:i] + args[i + 1 :]
    return None, args


def _gives(section: str, name: str, args: list[str]) -> bool:
    """Whether a command line or its run's TOML file has a value for a field of the config."""
    file, words = _run_file(args)
    if file and name in read_toml(file).get(section, {}):
        return True
    return any(word.partition("=")[0].replace("_", "-") == f"--{section}.{name}" for word in words)


def _resume_value(args: list[str]) -> list[str]:
    """Write out what ``--resume`` leaves out: the folder, and that run's own config where no other is given."""
    args = [part for word in args for part in (word.split("=", 1) if word.startswith("--resume=") else [word])]
    if "--resume" not in args:
        return args
    from shoal.spec.config import RUN_FILE

    i = args.index("--resume") + 1
    if i == len(args) or args[i].startswith("-") or args[i].endswith(".toml"):
        args.insert(i, str(_folder_to_resume(args)))
    if _run_file(args)[0] is None:
        run_file = Path(args[i]) / RUN_FILE
        if not run_file.is_file():
            raise UsageError(f"--resume {args[i]}: this is no run folder, it has no {RUN_FILE}.")
        args.insert(0, str(run_file))
    return args


def _folder_to_resume(args: list[str]) -> Path:
    if "--run-folder" in args[:-1]:
        return Path(args[args.index("--run-folder") + 1])
    from shoal.spec.config import RUN_FILE
    from shoal.training.run_folder import RUNS

    runs = sorted(RUNS.glob(f"*/{RUN_FILE}"), key=lambda file: file.stat().st_mtime)
    if not runs:
        raise UsageError(f"--resume: there is no run under {RUNS.resolve()}.\n  Name a run folder: --resume PATH.")
    return runs[-1].parent
