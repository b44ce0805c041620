"""No run ever writes into another's folder, however close together they start."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from shoal.base.errors import UsageError
from shoal.spec.config import RUN_FILE, RunConfig, build_config, load_config
from shoal.training import run_folder
from shoal.training.run_folder import new_run


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

    def save(config, path, **options):
        if config is not first:
            new_run(first, folder)
        return original(config, path, **options)

    original = run_folder.save_config
    monkeypatch.setattr(run_folder, "save_config", save)
    with pytest.raises(UsageError, match="exists already"):
        new_run(RunConfig(), folder)
    assert load_config(folder / RUN_FILE) == first


def test_a_file_in_its_place_is_refused(tmp_path):
    (tmp_path / "run").write_text("mine")
    with pytest.raises(UsageError, match="exists already"):
        new_run(RunConfig(), tmp_path / "run")
