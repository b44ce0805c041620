"""The Python API: its names are there, documented, listed and lazy, and their examples run."""

import doctest
import importlib
import inspect
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

import shoal
from shoal.launch.prefork import PreforkServer
from shoal.testing.chaos import run

PAGE = (Path(__file__).parents[1] / "docs" / "api.md").read_text()
NAMES = [name for name in shoal.__all__ if not name.startswith("__")]


def test_importing_shoal_loads_neither_torch_nor_numpy_nor_pydantic() -> None:
    code = "import sys, shoal; print({'torch', 'numpy', 'pydantic'} & set(sys.modules), shoal.__version__)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["set()", shoal.__version__]


def test_a_name_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Layuot'"):
        getattr(shoal, "Layuot")  # noqa: B009 -- as a user would meet it
    assert set(shoal.__all__) <= set(dir(shoal))


def run_examples(name: str) -> None:
    value = getattr(shoal, name)
    home = importlib.import_module(inspect.unwrap(value).__module__)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for test in doctest.DocTestFinder(recurse=False).find(value, name, module=home):
        assert runner.run(test).failed == 0


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A folder in which the example of `train` has been run: the others read its run, ``runs/example``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("example"))
        patch.setenv("PYTHONPATH", str(Path(shoal.__file__).parents[1]))
        run_examples("train")
        yield


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("SCHEDULES", "train")])
def test_a_public_name_is_documented_with_an_example_that_runs(
    name: str, example: None, rank_server: PreforkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "start_rank_server", lambda *_: nullcontext(rank_server))  # which has imported all
    said = inspect.getdoc(getattr(shoal, name)) or ""
    assert len(said.split("\n\n")[0]) > 10 and ">>>" in said
    run_examples(name)


@pytest.mark.parametrize("name", [name for name in NAMES if inspect.isfunction(getattr(shoal, name))])
def test_every_argument_of_a_public_function_is_checked_and_the_function_can_be_pickled(name: str) -> None:
    public = getattr(shoal, name)
    assert pickle.loads(pickle.dumps(public)) is public
    for parameter in inspect.signature(public).parameters.values():
        if (parameter.kind, str(parameter.annotation)) != (inspect.Parameter.VAR_KEYWORD, "Any"):
            with pytest.raises(shoal.UsageError, match=rf"^{name}: \w+ = <object .* is of type object\.\n  Give "):
                public(**{parameter.name: object()})


def test_the_page_lists_every_name_and_its_examples_run() -> None:
    listed = set(re.findall(r"^\| `(?:shoal\.)?(\w+)", PAGE, re.MULTILINE))
    assert listed == set(NAMES)
    test = doctest.DocTestParser().get_doctest(PAGE, {}, "api.md", "docs/api.md", 0)
    assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE).run(test).failed == 0


def test_the_version_is_that_of_the_package() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", shoal.__version__)


def test_results_and_configs_are_shown_in_short() -> None:
    assert str(shoal.Layout(dp=2, tp=4)) == "dp=2 tp=4" and repr(shoal.Layout()) == "Layout()"
    estimate = shoal.estimate(shoal.Layout(dp=8, zero=3), model="llama-3-8b", cluster="8xH100")
    assert re.fullmatch(
        r"<Estimate: dp 8 \(ZeRO-3\) on 8xH100: [\d.]+ s a step, [\d.]+ % MFU, [\d.]+ GB of [\d.]+ GB>", repr(estimate)
    )
    program = shoal.build_program(shoal.SCHEDULES["1f1b"], ranks=4, microbatches=8)
    assert repr(program) == "<Program: 4 ranks, 4 stages, 8 micro-batches, 168 actions>"
    assert repr(shoal.simulate(program)) == "<Timeline: 33 a step, bubble 27.3 %, 4 ranks>"
    counted = shoal.dry_run(shoal.Layout(), model="tiny", cluster="h100-sxm", steps=1)
    assert re.fullmatch(r"<DryRun: rank 0 of 1: [\d.]+ GFLOP a step, peak of memory [\d.]+ MB>", repr(counted))
    assert repr(shoal.cluster("2x8xH100")).startswith("<Cluster 2x8xH100: 16 x h100-sxm, nvlink-4 inside each node")
    plan = shoal.LayoutPlanner("llama-3.2-1b", "8xH100", fixed="pp=1,tp=1").plan()
    assert repr(plan).splitlines()[0] == "<Plan on 8xH100:" and plan.found.layout.describe() in repr(plan)
    assert repr(shoal.LayoutPlanner("llama-3.1-405b", "h100-sxm").plan()) == "<Plan on h100-sxm: nothing fits>"


def test_a_run_its_report_and_its_checkpoint_are_shown_in_short(example: None) -> None:
    assert repr(shoal.write_report("runs/example")).startswith("<RunReport: example, step 2 of 2, loss ")
    found = shoal.describe_checkpoint("runs/example/checkpoints/step-00000002")
    assert str(found) == repr(found) and re.fullmatch(
        r"<Manifest: step 2, \d+ tensors of [\d,]+ bytes in 1 files>", repr(found))
    run = shoal.Run(lambda: None, lambda model, batch: None, [1], layout=shoal.Layout(dp=2), name="mine")
    assert repr(run) == "<Run: mine on dp 2 (DDP)>"


def test_results_can_be_pickled() -> None:
    """For a cache of a notebook, or estimates by several processes."""
    layout, found = shoal.Layout(dp=8, zero=3), shoal.LayoutPlanner("llama-3.2-1b", "8xH100", fixed="pp=1,tp=1").plan()
    estimate = shoal.estimate(layout, model="llama-3-8b", cluster="8xH100")
    program = shoal.build_program(shoal.SCHEDULES["1f1b"], ranks=2, microbatches=4)
    for result in (layout, estimate, found, program, shoal.check_program(program), shoal.simulate(program)):
        assert repr(pickle.loads(pickle.dumps(result))) == repr(result)


def test_a_path_is_a_text_also_inside_a_section() -> None:
    given = {"paths": [Path("a b"), "c"], "tokenizer": Path("t.json"), "validation": {"more": Path("d")}}
    config = shoal.RunConfig(data=given, checkpoint={"folder": Path("e")})
    assert (config.data.paths, config.data.tokenizer) == (("a b", "c"), "t.json")
    assert (config.data.validation, config.checkpoint.folder) == ({"more": "d"}, "e")
    with pytest.raises(shoal.UsageError, match=r"^RunConfig: train.steps = 'x': input should be a valid integer"):
        shoal.RunConfig(train={"steps": Path("x")})
