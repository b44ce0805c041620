"""`shoal simulate`: what it prints, writes and refuses."""

import doctest
import json
import re
from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.pipeline.program import build_program
from shoal.pipeline.schedules import SCHEDULES
from shoal.pipeline.schedules.file import dump_csv
from shoal.pipeline.simulator.compare import schedule_name


def test_schedules_are_compared_side_by_side(capsys: pytest.CaptureFixture) -> None:
    args = "--schedule zbv --pp 4 --microbatches 8 --compare 1F1B,zb-h1,zb-2p"
    assert main(["simulate", *args.split()]) == 0
    out = capsys.readouterr().out
    steps = next(line for line in out.splitlines() if line.startswith("step")).split()[1:]
    assert steps == ["25.5", "T", "33", "T", "27", "T", "27", "T"]
    assert "zb-h1: simulated: idle 3, 4 alive; by the closed form: 3, 4 (Qi et al. 2024" in " ".join(out.split())


@pytest.mark.parametrize("name", ["out.html", "out.svg", "out.png", "out.json", "out.json.gz"])
def test_timelines_are_written(name: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    args = "--pp 2 --microbatches 2 --comm 0.1 --latency 0.1 --jitter 0.1 --straggler 1=2 --slow-link 0-1=3 --seconds"
    assert main(["simulate", *args.split(), "--out", str(tmp_path / name)]) == 0
    assert (tmp_path / name).stat().st_size > 500
    assert f"written: {tmp_path / name}" in capsys.readouterr().out.replace("\n", "")
    if name == "out.json":
        assert json.loads((tmp_path / name).read_text())["traceEvents"]


def test_a_schedule_is_written_and_played_from_its_file(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    wanted = "simulate --schedule zb-h1 --pp 3 --microbatches 6 --out"
    writing = [*wanted.split(), str(tmp_path / "mine.csv")]
    assert main(writing) == 0
    assert (tmp_path / "mine.csv").read_bytes() == dump_csv(build_program(SCHEDULES["zb-h1"], 3, 6)).encode()
    assert main(writing) == 2, "it may be edited by now"
    assert "mine.csv" in capsys.readouterr().err
    assert main(["simulate", "--schedule", "terapipe", "--out", str(tmp_path / "other.csv")]) == 2
    shown = capsys.readouterr()
    assert not shown.out and "4 slices" in shown.err and not (tmp_path / "other.csv").exists()
    assert main(["simulate", "--csv", str(tmp_path / "mine.csv"), "--compare", "zb-h1"]) == 0
    steps = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("step")).split()[1:]
    assert steps == ["20", "T", "20", "T"]


def test_a_straggler_in_one_of_many_replicas_slows_all(capsys: pytest.CaptureFixture) -> None:
    def step(*args: str) -> str:
        assert main(["simulate", "--pp", "4", *args]) == 0
        return capsys.readouterr().out.split(",")[0]

    many = ("--dp", "8", "--tp", "2")
    assert step(*many) == step() == "1f1b: 33 T"
    assert step(*many, "--straggler", "37=2") == step("--straggler", "2=2") != step()


def test_printed_bubbles_are_compared_row_by_row(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    note = "theoretical bubble rate (Table 5)=0.2431; profiled TF/TB/TW/Tcomm ms=18.522/18.086/9.337/0.601"
    names = "row_id,schedule,pp,num_microbatches,vpp,heads,seq,hidden,note"
    (tmp_path / "zero_bubble.csv").write_text(f"{names}\nfirst,1F1B,8,24,1,24,1024,2304,{note}\n")
    assert main(["simulate", "--check", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[1].split() == ["first", "1F1B", "8", "24", "1", "24.31", "%", "24.31", "%", "-0.00"]
    assert "mean absolute error: 0.005 percentage points" in out


def test_times_of_a_machine_that_was_calibrated(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """What is played is what is estimated; twice as slow a machine takes twice as long."""
    steps = []
    for name, speed in (("here", 1e11), ("there", 0.5e11)):
        file = tmp_path / f"{name}.toml"
        rates = f'peak_flops = {{ fp32 = {speed} }}\nmemory_bandwidth = {speed / 10}\nmemory_bytes = 1e10'
        file.write_text(
            f'[accelerators.{name}]\n{rates}\nsource = "a test"\n'
            f'[links.{name}]\nbandwidth = {speed / 20}\nlatency = {1e6 / speed}\nsource = "a test"\n'
            f'[nodes.{name}]\naccelerator = "{name}"\ninside = "{name}"\nper_node = 64\nsource = "a test"\n'
            f"[nodes.{name}.constants]\nlaunch = {1e6 / speed}\nlatency_inside = {1e6 / speed}\nmicro_batch = 0.0\n"
            f"collective_launch = 0.0\nfixed = 0.0\n"
        )
        words = f"--cluster 4x{name} --catalog {file} --model tiny --precision fp32 --compare zb-h1 --microbatches 6"
        assert main(["simulate", *words.split(), "--sequence-length", "128"]) == 0
        said = capsys.readouterr().out
        found = re.findall(r"(\S+): shoal estimate predicts (\S+) ms a step", said)
        assert [schedule for schedule, _ in found] == ["1f1b", "zb-h1"]
        assert f"{found[0][1]} ms" in said.split("1f1b: shoal")[0], "and as it was played"
        steps.append([float(step) for _, step in found])
    assert steps[1] == pytest.approx([2 * step for step in steps[0]], rel=0.01)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--schedule zbq", "there is no schedule 'zbq'; did you mean 'zb-v'?"),
        ("--compare 1f1b,qqqq", "there is no schedule 'qqqq'; allowed: 1f1b, dualpipe"),
        ("--schedule dualpipe --pp 3", "dualpipe needs an even number of pipeline ranks"),
        ("--straggler 4=2", "straggler 4: the world has ranks 0 to 3 (pp 4 x dp 1 x tp 1)"),
        ("--straggler two=2", "--straggler two=2: give RANK=FACTOR, as 3=1.5"),
        ("--slow-link 0=2", "--slow-link 0=2: give A-B=FACTOR, as 0-1=1.5"),
        ("--slow-link 0-0=2 --comm 1", "activations only pass between pipeline ranks of one replica"),
        ("--jitter 2", "jitter 2.0: allowed are 0 to 1"),
        ("--schedule dualpipe --microbatches 1", "--pp 4 --microbatches 1: dualpipe needs a micro-batch for each"),
        ("--slow-link 0-1=2", "--slow-link: messages take no time"),
        ("--schedule zb-v --virtual-stages 3", "--virtual-stages 3: only for looped-bfs, interleaved-1f1b"),
        ("--memory 3", "--memory 3.0: only for zb-auto, not 1f1b"),
        ("--pair 3 --compare zb-h1", "--pair 3.0: only for dualpipe, dualpipev, not 1f1b, zb-h1"),
        ("--forward 0 --backward-input 0 --backward-weight 0", "there is nothing to play"),
        ("--out step.pdf", "--out step.pdf: give a file ending in .html or .svg"),
        ("--out nowhere/step.svg", "nowhere/step.svg: there is no folder nowhere"),
        ("--cluster 4xH100 --model tiny --comm 1", "--comm 1.0: with --cluster, the times come from the estimate"),
        ("--cluster 2xH100 --model tiny", "but 2 were given"),
        ("--cluster 4xH100 --model tiny --schedule zb-2p", "there is no such schedule"),
        ("--model tiny", "--model tiny: only with --cluster"),
        ("--csv nowhere.csv", "no such file: nowhere.csv"),
        ("--check nowhere", "nowhere has no zero_bubble.csv"),
    ],
)
def test_what_cannot_be_is_refused_in_words(args: str, message: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["simulate", *args.split()]) == 2
    assert message in capsys.readouterr().err


def test_names_are_found_however_they_are_written() -> None:
    assert [schedule_name(name) for name in ("ZBV", "zb_h1", "1F1B", "interleaved", "DualPipe V")] == [
        "zb-v", "zb-h1", "1f1b", "interleaved-1f1b", "dualpipev",
    ]  # fmt: skip


def test_the_page_about_it_says_what_is_so() -> None:
    page = Path(__file__).parents[2] / "docs" / "simulate.md"
    assert doctest.testfile(str(page), module_relative=False) == doctest.TestResults(failed=0, attempted=6)
