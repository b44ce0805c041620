"""`shoal train` as a user types it: what a run shows and leaves, under torchrun too, and what it refuses."""

import os
import pty
import re
import select
import sys

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from shoal.cli.main import main
from shoal.engine.checkpoint import verify
from shoal.spec.config import load_config
from tests.trainings.fixtures import BASE_STEPS
from tests.trainings.forked import command
from tests.trainings.runs import ROOT, checkpoints, curve, records, same_bits, shoal, train_in, wait_for

TORCHRUN = ("--nproc-per-node", "2", "--standalone")


# ---- one run on 4 ranks ----------------------------------------------------------------------------------------------


def test_output_that_is_no_terminal_is_plain_lines(base_run):
    folder, output = base_run
    assert "\x1b" not in output and "\r" not in output
    assert re.search(r"^layout +dp 2 \(ZeRO-1\) x tp 2 = 4 ranks$", output, re.M)
    assert re.search(r"^ +dp 1 │ +2 │ +3 │$", output, re.M)
    assert re.search(rf"^run +{folder}$", output, re.M)
    assert len(re.findall(r"^ +\d+  \d+\.\d{4}  ", output, re.M)) == BASE_STEPS


def test_it_ends_with_a_validation_loss_and_a_sample_of_its_data(base_run, corpus):
    folder, output = base_run
    lines = output.splitlines()
    assert lines[-1] == f"run folder: {folder}"
    final = re.fullmatch(r"finished in .+: validation loss (\d+\.\d{4}) nats per token", lines[-2])
    assert float(final[1]) == pytest.approx(records(folder)[-1].validation_loss, abs=1e-4)
    after = lines[lines.index("sample of generated text:") + 1 : -2]
    text = "\n".join(after).strip()  # of the data, then of a model that has hardly learned
    assert text[:4] in (corpus / "shoal.jsonl").read_text() and len(text) > 100


def test_each_logged_step_has_its_numbers(base_run):
    found = records(base_run[0])
    assert [r.step for r in found] == list(range(1, BASE_STEPS + 1)) and {r.steps for r in found} == {BASE_STEPS}
    for r in found:
        assert 0 < r.mfu <= 1
        assert r.tokens_per_second == pytest.approx(4 * r.tokens_per_second_per_rank)
        assert r.memory_bytes > 50 * 2**20 and r.gradient_norm > 0 and r.seconds_left >= 0
    assert [r.step for r in found if r.validation_loss is not None] == [BASE_STEPS // 2, BASE_STEPS]
    assert [r.learning_rate for r in found[:4]] == pytest.approx([0.0025, 0.005, 0.0075, 0.01])
    # bytes: untrained it knows nothing of 257 ids; 16 steps teach it at least their frequencies
    assert found[0].loss == pytest.approx(5.55, abs=0.1)
    assert found[-1].loss < 4.2 and found[-1].validation_loss < 4.2  # from ln 256 = 5.5


def test_tensorboard_has_the_same_curve(base_run):
    folder, _ = base_run
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    loss = [(event.step, event.value) for event in events.Scalars("loss/train")]
    assert [step for step, _ in loss] == list(range(1, BASE_STEPS + 1))
    assert [value for _, value in loss] == pytest.approx([value for _, value, _ in curve(folder)], rel=1e-6)
    tags = {"speed/mfu", "speed/tokens_per_second", "optimizer/gradient_norm", "loss/validation"}
    assert tags <= set(events.Tags()["scalars"])


def test_the_folder_of_the_run(base_run, base_config):
    folder, _ = base_run
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoints", "events.jsonl", "logs", "metrics.jsonl", "run.toml", "tensorboard"]
    assert load_config(folder / "run.toml") == load_config(base_config)
    assert sorted(path.name for path in (folder / "logs").iterdir()) == [f"rank-{rank}.log" for rank in range(4)]
    assert sorted(checkpoints(folder)) == list(range(4, BASE_STEPS + 1, 4))
    for path in checkpoints(folder).values():
        verify(path)


def test_a_folder_that_exists_is_refused_and_not_touched(base_config, tmp_path, capfd):
    (tmp_path / "notes.txt").write_text("mine")
    assert main(["train", str(base_config), "--run-folder", str(tmp_path)]) == 2
    said = capfd.readouterr().err
    assert f"--run-folder {tmp_path} exists already" in said and "\n  Name another folder.\n" in said
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert (tmp_path / "notes.txt").read_text() == "mine"


# ---- bad input -------------------------------------------------------------------------------------------------------

BAD = {
    "tp that does not divide": (["--parallel.tp", "3"], ["parallel.tp = 3 does not divide model.heads = 2"]),
    "ranks that are not the layout's": (
        ["--ranks", "3"], ["pp 1 x dp 2 x tp 2 = 4 ranks, but 3 were given", "Use 4 ranks"]),
    "a path that is not there": (["--data.paths", "/no/such/folder"], ["/no/such/folder"]),
    "a tokenizer that is not there": (["--data.tokenizer", "/no/such.json"], ["/no/such.json"]),
    "a model that is not in the catalog": (["--model.name", "tinny"], ["tinny", "did you mean 'tiny'?"]),
    "a batch that does not divide": (["--train.global_batch", "6"], ["train.global_batch = 6"]),
    "a value out of its range": (["--train.steps", "0"], ["train.steps = 0"]),
    "a device that is not there": (["--train.device", "cuda"], ["torch sees no CUDA device here"]),
    "wandb, not installed": (["--metrics.wandb", "mine"], ["metrics.wandb = 'mine'", "Install shoal[wandb]"]),
    "mlflow, not installed": (["--metrics.mlflow", "mine"], ["metrics.mlflow = 'mine'", "Install shoal[mlflow]"]),
}


@pytest.mark.parametrize("what", BAD)
def test_what_cannot_be_is_refused_before_anything_is_made(what, base_config, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for package in ("wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, package, None)
    words, expected = BAD[what]
    assert main(["train", str(base_config), "--run-folder", str(tmp_path / "run"), *words]) == 2
    said = capfd.readouterr().err
    assert said.startswith("shoal: error: ") and said.count("error") == 1
    assert all(text in said for text in expected), said
    assert "Traceback" not in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("key", "near"), [("stepz = 3", "did you mean 'steps'?"), ("zero = 1", "parallel.zero")])
def test_a_typo_in_the_file_names_the_nearest_key(key, near, base_config, tmp_path):
    file = tmp_path / "typo.toml"
    file.write_text(base_config.read_text().replace("[train]\n", f"[train]\n{key}\n"))
    code, output = shoal("train", file, "--run-folder", tmp_path / "run")
    assert code == 2
    assert f"{file}: there is no key 'train.{key.split()[0]}'" in output and near in output
    assert len(output.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_a_typo_on_the_command_line_names_the_nearest_option(base_config, tmp_path):
    code, output = shoal("train", base_config, "--train.stepz", "3", "--run-folder", tmp_path / "run")
    assert code == 2
    assert "--train.stepz" in output and "--train.steps" in output and "Traceback" not in output
    assert not (tmp_path / "run").exists()


# ---- torchrun --------------------------------------------------------------------------------------------------------

TWO = ("--parallel.dp", "2", "--parallel.tp", "1", "--train.steps", "4")


def test_torchrun_trains_the_same_in_one_folder_for_all_ranks_and_resumes(base_config, pool, tmp_path):
    code, output = shoal("train", base_config, *TWO, agent=TORCHRUN, cwd=tmp_path)
    assert code == 0, output
    assert output.count("finished in") == 1
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.endswith("-tiny") and f"run folder: {folder.relative_to(tmp_path)}" in output
    plain = train_in(pool, load_config(folder / "run.toml"), tmp_path / "plain")
    assert curve(folder) == curve(plain)
    assert same_bits(checkpoints(folder)[4], checkpoints(plain)[4])
    # An interpreter of its own for torchrun and for its one worker: what the forks above leave out.
    words = ("--resume", folder, "--train.steps", "6", "--parallel.dp", "1", "--parallel.zero", "0")
    code, output = shoal("train", *words, launcher=("torch.distributed.run", "--nproc-per-node", "1", *TORCHRUN[2:]))
    assert code == 0, output
    assert "resumed after step 4" in output and [step for step, _, _ in curve(folder)] == [1, 2, 3, 4, 5, 6]


# ---- a terminal ------------------------------------------------------------------------------------------------------


def test_on_a_terminal_ctrl_c_stops_cleanly_and_leaves_it_in_order(base_config, tmp_path):
    """A real terminal: the line discipline turns the byte of Ctrl-C into SIGINT for the whole foreground group."""
    words = ["train", base_config, *TWO[:4], "--train.steps", "4000", "--run-folder", tmp_path / "run"]
    terminal, other = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
    process = command([str(word) for word in words], environment, ROOT, terminal=os.ttyname(other))
    shown = bytearray()

    def read_until(text: bytes) -> None:
        def seen() -> bool:
            if select.select([terminal], [], [], 0.1)[0]:
                shown.extend(os.read(terminal, 65536))
            elif process.poll() is not None:
                return True
            return text in shown
        wait_for(seen)

    try:
        read_until(b"step 8/")
        os.write(terminal, b"\x03")
        read_until(b"\x00never")
    finally:
        process.kill()
        os.close(other)
        os.close(terminal)
    text = shown.decode()
    assert process.returncode == 0, text
    assert "╭─" in text and "stopped after step" in text and "Traceback" not in text
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l") >= 0  # the cursor is shown again
