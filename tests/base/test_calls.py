"""Arguments of public functions: what is as good is converted, what is not is refused before any work."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from pydantic import NonNegativeInt, PositiveInt

import shoal
from shoal.base.calls import WRONG, check_arguments, convert
from shoal.base.errors import UsageError
from shoal.spec.config import build_config

PROGRAM = shoal.build_program(shoal.SCHEDULES["1f1b"], ranks=2, microbatches=4)
LINEAR = torch.nn.Linear(4, 4).double()
OWN = shoal.Run(model=lambda: LINEAR, loss=lambda m, b: (m(b).sum(), len(b)), data=torch.ones(8, 4), global_batch=8)


@pytest.mark.parametrize(("kind", "given", "expected"), [
    (int, np.int64(3), 3), (int, torch.tensor(3), 3), (int, 1e4, 10_000), (int, 1.5, WRONG), (int, "3", WRONG),
    (int, True, WRONG), (int | None, None, None), (int, None, WRONG), (bool, 1, WRONG), (bool, np.True_, True),
    (float, 3, 3), (float, np.float32(0.5), 0.5), (float, "3", WRONG), (int | str, "3", "3"),
    (str, Path("a"), "a"), (str | Path, Path("a"), Path("a")), (str | Path, 3, WRONG), (Path, "a", Path("a")),
    (Literal["auto"] | None, "other", "other"), (Literal["auto"], 3, WRONG), (Any, 3, 3),
    (Sequence[str], "ab", WRONG), (str | Sequence[str], "ab", "ab"), (Sequence[str], {"a": 1}.keys(), ["a"]),
    (Sequence[int], np.array([2, 4]), [2, 4]), (Sequence[int], (2, "4"), WRONG), (tuple[str, ...], ["a"], ("a",)),
    (Sequence[tuple[int, float]], [(2, 1.0)], [(2, 1.0)]), (Sequence[tuple[int, float]], [(2,)], WRONG),
    (Mapping[int, float], {np.int64(1): 2}, {1: 2}), (Mapping[int, float], {"a": 2}, WRONG),
    (PositiveInt, 1, 1), (PositiveInt, 0, WRONG), (NonNegativeInt, 0, 0), (NonNegativeInt | None, -1, WRONG),
    (PositiveInt, "3", WRONG), (Mapping[int, float], 3, WRONG),
    (Callable[[int], int], len, len), (Callable[[int], int], 3, WRONG),
])  # fmt: skip
def test_values_are_converted_or_refused(kind, given, expected):
    found = convert(kind, given)
    assert found is expected or (found == expected and type(found) is type(expected))


def test_a_value_of_its_type_stays_the_same_object():
    prompts, times = ["a", "b"], np.ones(3)
    assert convert(str | Sequence[str], prompts) is prompts and convert(np.ndarray | None, times) is times


def test_all_kinds_of_parameters_are_checked():
    @check_arguments
    def called(first: int, *more: int, named: str = "", **others: float):
        return first, more, named, others

    assert called(np.int64(1), 2.0, named=Path("a"), x=1) == (1, (2,), "a", {"x": 1})
    for wrong in (lambda: called("1"), lambda: called(1, "2"), lambda: called(1, named=3), lambda: called(1, x="3")):
        with pytest.raises(UsageError, match=r"called: \w+ = '?\d'? is of type (str|int)\.\n  Give"):
            wrong()
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        called()


@pytest.mark.parametrize(("call", "message"), [
    (lambda: shoal.train("a.toml"), r"train: config = 'a.toml' is of type str.\n  Give RunConfig: shoal.load_config"),
    (lambda: shoal.estimate({"dp": 2}), r"estimate: layout = {'dp': 2} is of type dict.\n  Give Layout: such as shoal"),
    (lambda: shoal.LayoutPlanner(cluster=8), "LayoutPlanner: cluster = 8 is of type int.\n  Give str."),
    (lambda: shoal.plan(batch_size=8), "plan: there is no argument 'batch_size'; did you mean 'global_batch'?"),
    (lambda: shoal.evaluate("none", sequences=0), "evaluate: sequences = 0.\n  Give int > 0"),
    (lambda: shoal.evaluate("none", sequences="0"), "evaluate: sequences = '0' is of type str.\n  Give int > 0"),
    (lambda: shoal.dry_run(shoal.Layout(), steps=0), "dry_run: steps = 0.\n  Give int > 0"),
    (lambda: shoal.dry_run(shoal.Layout(dp=2), model="tiny", cluster="2xH100", rank=-1), "--rank -1: .* 0 to 1"),
    (lambda: shoal.Layout(tp=0), "Layout: tp = 0: input should be greater than 0"),
    (lambda: shoal.Layout(tpp=2), "Layout: there is no key 'tpp'; did you mean 'tp'?"),
    (lambda: shoal.ClusterJob(on="slrum", run_folder="a"), "ClusterJob: on = 'slrum': there is no such value; did"),
    (lambda: shoal.ClusterJob(on="slurm"), "ClusterJob: run_folder: field required"),
    (lambda: shoal.RunConfig(train={"stpes": 3}), "RunConfig: there is no key 'train.stpes'; did you mean 'steps'?"),
    (lambda: shoal.calibrate(ranks=[]), "calibrate: ranks = \\[\\]: no number of ranks"),
    (lambda: shoal.calibrate(rounds=0), "calibrate: rounds = 0.\n  Give int > 0"),
    (lambda: shoal.estimate(shoal.Layout(), sequence_length=0), "sequence_length = 0.\n  Give int > 0 or None"),
    (lambda: shoal.plan("tiny", sequence_length=-1), "plan: sequence_length = -1.\n  Give int > 0 or None"),
    (lambda: shoal.train(build_config({}), ranks=-2), "train: ranks = -2.\n  Give int > 0 or None"),
    (lambda: shoal.build_program(shoal.SCHEDULES["1f1b"], 2, 0), "build_program: microbatches = 0.\n  Give int > 0"),
    (lambda: shoal.simulate(PROGRAM, tp=-1), "simulate: tp = -1.\n  Give int > 0"),
    (lambda: shoal.simulate(PROGRAM, np.ones(3)), r"times: an array of shape \(3,\), and the program has \d+ actions"),
    (lambda: shoal.plan_operators(LINEAR, (torch.ones(2, 4),), stages=0), "stages = 0.\n  Give int > 0"),
    (lambda: shoal.plan_operators(LINEAR, (torch.ones(2, 4),), memory="0"), "no split of the operators fits into"),
    (lambda: shoal.export_megatron(build_config({}).data, ""), "names no file"),
    (lambda: OWN.dry_run(steps=0), "dry_run: steps = 0.\n  Give int > 0"),
    (lambda: OWN.verify(steps=0), "verify: steps = 0.\n  Give int > 0"),
    (lambda: shoal.load_config(None), "load_config: path = None.\n  Give str or Path."),
])  # fmt: skip
def test_messages_name_what_was_given_and_what_is_allowed(call, message):
    with pytest.raises(UsageError, match=message):
        call()


def test_numbers_of_numpy_are_numbers_of_a_config():
    assert shoal.Layout(dp=np.int64(2)).dp == 2
    planner = shoal.LayoutPlanner("tiny-gpt", "8xH100", global_batch=np.int64(64), sequence_length=np.int32(256))
    assert (planner.run.global_batch, planner.run.sequence_length) == (64, 256)
    assert build_config({"train": {"steps": np.int64(3)}}).train.steps == 3
    assert shoal.AdamW(lr=np.float32(0.5)).learning_rate == 0.5
