"""No run ever writes into another's folder, however close together they start."""

import json
import os
import shlex
import signal
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from shoal.base.errors import UsageError
from shoal.base.files import write_atomically
from shoal.cli.arguments import parse_run
from shoal.cli.run.train import TrainOptions
from shoal.engine.data.prepare import train_tokenizer
from shoal.engine.optim.schedule import learning_rate
from shoal.launch.inference import sample
from shoal.report.curves import describe_curves
from shoal.report.run import write_report
from shoal.spec.config import RUN_FILE, RunConfig, build_config, load_config, save_config, suggest_run
from shoal.training import run_folder
from shoal.training.records.metrics import read_metrics
from shoal.training.resilience.events import read_events, write_event
from shoal.training.run_folder import (
    describe_changes,
    describe_rate,
    list_changes,
    new_run,
    resume_command,
    with_absolute_paths,
)
from shoal.training.stop import TOGETHER_SECONDS, StopRequests
from tests.trainings.runs import shoal, small_config


def test_starts_within_one_second_get_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_folder.time, "strftime", lambda _: "20260101-000000")
    configs = [build_config({"train": {"seed": seed}}) for seed in range(16)]
    with ThreadPoolExecutor(len(configs)) as threads:
        folders = list(threads.map(lambda config: new_run(config, None), configs))
    assert len(set(folders)) == len(configs)
    assert [load_config(folder / RUN_FILE) for folder in folders] == configs
    assert {folder.name for folder in folders} == {
        "20260101-000000-tiny", *(f"20260101-000000-tiny-{i}" for i in range(1, 16))}


def test_of_two_starts_into_one_folder_the_second_is_refused(tmp_path, monkeypatch):
    """Both find it empty before either has written."""
    folder = tmp_path / "run"
    first = build_config({"train": {"seed": 1}})

    def write(path, content, **options):
        monkeypatch.undo()
        new_run(first, folder)
        write_atomically(path, content, **options)

    monkeypatch.setattr(run_folder, "write_atomically", write)
    with pytest.raises(UsageError, match=r"exists already[^\n]*\n  Continue that run with --resume"):
        new_run(RunConfig(), folder)
    assert load_config(folder / RUN_FILE) == first


def test_a_run_continues_from_any_folder_after_its_text_and_tokenizer_have_moved(corpus, tmp_path):
    """Started in one folder with relative paths, resumed in another on another layout: a section of the record."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "some.jsonl").write_bytes((corpus / "shoal.jsonl").read_bytes())
    config = small_config(
        corpus, data={"paths": ["text"], "cache": "cache"}, train={"steps": 2, "validate_every": 0},
        checkpoint={"asynchronous": False},
    )
    absolute = with_absolute_paths(config.model_copy(update={"data": config.data.model_copy(update={
        "paths": (str(tmp_path / "text"),), "cache": tmp_path / "cache"})}))
    train_tokenizer(absolute.data, vocab_size=280, out=tmp_path / "own.json")
    save_config(config, tmp_path / "own.toml")
    code, said = shoal("train", "own.toml", "--data.tokenizer", "own.json", "--run-folder", "run", cwd=tmp_path)
    assert code == 0, said
    (tmp_path / "text").rename(tmp_path / "moved")
    (tmp_path / "own.json").unlink()
    (tmp_path / "run").rename(tmp_path / "away")
    folder = tmp_path / "away"
    assert sample(folder, "def", max_tokens=2)[0].startswith("def")
    code, said = shoal(
        "train", "--resume", folder, "--data.paths", tmp_path / "moved", "--train.steps", "4", "--parallel.dp", "2"
    )
    assert code == 0 and "resumed after step 2" in said and "train.steps = 4" in said, said
    resumed = next(event for event in read_events(folder) if event["event"] == "resumed")
    assert (resumed["step"], resumed["ranks"]) == (2, 2)
    assert {name: resumed["changed"][name] for name in ("train.steps", "parallel.dp")} == {
        "train.steps": 4, "parallel.dp": 2}
    [mark] = describe_curves("run", read_metrics(folder), read_events(folder))["marks"]
    assert (mark["step"], mark["kind"]) == (2, "layout")
    write_report(folder)
    with open(tmp_path / "moved" / "some.jsonl", "a") as file:
        file.write('{"text": "another"}\n')
    code, said = shoal("train", "--resume", folder, "--data.paths", tmp_path / "moved", "--train.steps", "5")
    assert code == 2 and "the text or its tokenizer has changed" in said


def test_a_resume_says_what_changes_and_what_the_last_one_had_changed(tmp_path):
    """Neither is remembered: a later resume without the options has the run's own values again."""
    folder = new_run(RunConfig(), tmp_path / "run")
    own = f"{folder / RUN_FILE}"
    assert resume_command(folder, RunConfig()) == f"shoal train --resume {folder}"
    longer = RunConfig().replace(
        train={"steps": 500, "threads": 1}, optimizer={"learning_rate": 0.01}, parallel={"dp": 2})
    assert resume_command(folder, longer) == (
        f"shoal train --resume {folder} --train.steps 500 --optimizer.learning-rate 0.01")
    changed = list_changes(folder, longer)
    assert [*describe_changes(folder, changed)] == [
        f"changed from {own}: parallel.dp = 2, train.steps = 500, train.threads = 1, optimizer.learning_rate = 0.01"]
    write_event(folder, "resumed", changed=changed)
    write_event(folder, "resumed")  # a restart, which names none
    assert [*describe_changes(folder, {"parallel.dp": 4, "train.threads": 2})] == [
        f"changed from {own}: parallel.dp = 4, train.threads = 2",
        f"not given again, so {own} counts; the last start had: train.steps = 500, optimizer.learning_rate = 0.01"]


def test_a_resume_names_a_jump_of_the_learning_rate(tmp_path):
    config = RunConfig().replace(train={"steps": 200})
    for step in (99, 100):
        rate = learning_rate(step, config.train.steps, config.optimizer)
        (tmp_path / "metrics.jsonl").write_text(json.dumps({
            "step": step + 1, "steps": 200, "loss": 1.0, "learning_rate": rate, "tokens_per_second": 1.0,
            "tokens_per_second_per_rank": 1.0, "memory_bytes": 1, "seconds_left": 0.0}) + "\n")
        assert [*describe_rate(tmp_path, config, step + 1)] == []
    longer = config.replace(train={"steps": 1000})
    jump = "the learning rate is 9.8e-04 in step {}, after 6.3e-04 in step 101"
    assert [*describe_rate(tmp_path, longer, 101)] == [jump.format(102)]
    assert [*describe_rate(tmp_path, longer, 105)] == [jump.format(106)]  # between two records
    assert [*describe_rate(tmp_path, config, 190)] == []  # it falls, as the cosine does
    assert [*describe_rate(tmp_path, longer, 100)] == []  # before the first record


def test_a_file_in_its_place_is_refused(tmp_path):
    (tmp_path / "run").write_text("mine")
    with pytest.raises(UsageError, match="exists already"):
        new_run(RunConfig(), tmp_path / "run")


def test_the_command_that_resumes_can_be_pasted(tmp_path):
    folder = new_run(RunConfig(), tmp_path / "with space")
    assert shlex.split(resume_command(folder, RunConfig()))[3:] == [str(folder)]


@pytest.mark.parametrize("changes", [
    {"nesterov": True}, {"betas": (0.8, 0.99)}, {"lr_factors": {"head": 2.0, "embed*": 0.5}},
])
def test_the_command_that_resumes_gives_every_changed_setting_of_the_optimizer(tmp_path, changes):
    folder = new_run(RunConfig(), tmp_path / "run")
    wanted = RunConfig().replace(optimizer=changes)
    words = shlex.split(resume_command(folder, wanted))[2:]
    assert parse_run("train", TrainOptions, words)[1].optimizer == wanted.optimizer


def test_a_checkpoint_to_resume_is_refused_with_the_commands_that_resume_from_it(tmp_path):
    """Also a second time, when later checkpoints were saved again; what is no checkpoint stays."""
    run = new_run(RunConfig(), tmp_path / "my run")
    steps = [run / "checkpoints" / f"step-{step:08d}" for step in (2, 4, 6, 100_000_000)]
    other = run / "checkpoints" / "step-00000006.note"
    other.mkdir(parents=True)
    for step, kept in ((steps[3], 4), (steps[1], 2), (steps[1], 2)):
        for each in steps:
            each.mkdir(exist_ok=True)
            (each / "manifest.json").write_text("{}")
        with pytest.raises(UsageError) as refused:
            parse_run("train", TrainOptions, ["--resume", str(step)])
        commands = str(refused.value).rpartition("with the options to change: ")[2].split(" && ")
        assert shlex.split(commands.pop()) == ["shoal", "train", "--resume", str(run)]
        for command in commands:
            subprocess.run(shlex.split(command), check=True)
        assert sorted((run / "checkpoints").iterdir()) == sorted([*steps[:kept], other])
    assert len(list(run.glob("after-step-00000004*/step-*"))) == 4, "nothing is lost"


def test_a_folder_of_runs_suggests_the_newest(tmp_path):
    """Also beside a run.toml written by hand."""
    runs = tmp_path / "runs"
    for name, time in (("c", 1000), ("a", 3000), ("b", 2000)):
        os.utime(new_run(RunConfig(), runs / name) / RUN_FILE, (time, time))
    (tmp_path / RUN_FILE).write_text("")
    assert suggest_run(runs) == f"\n  Did you mean {runs / 'a'}?"
    assert suggest_run(runs / "a" / "checkpoints") == f"\n  Did you mean {runs / 'a'}?"


def test_the_second_signal_of_a_request_finds_the_handler_also_after_a_short_run():
    """A wrapper signals a process and then its group: the second came after the run had been saved, and ended it."""
    second = threading.Timer(TOGETHER_SECONDS / 2, os.kill, [os.getpid(), signal.SIGINT])
    with StopRequests() as stops:
        second.start()
        signal.raise_signal(signal.SIGINT)
    second.join()
    assert stops.count == 1 and not stops.preempted
    with StopRequests() as stops:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
    assert stops.count == 1 and stops.preempted, "the host is to be left, whichever came first"


def test_a_command_to_copy_quotes_a_folder_with_spaces(tmp_path):
    folder = tmp_path / "my runs" / "one"
    new_run(RunConfig(), folder)
    with pytest.raises(UsageError, match=f"--resume '{folder}'"):
        new_run(RunConfig(), folder)
    with pytest.raises(UsageError, match=f"shoal train --resume '{folder}' continues it"):
        load_config(folder)
