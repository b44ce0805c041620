"""The wheel: built without a network, it has every file that shoal reads, and works from an empty environment."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.trainings.runs import ROOT

GENERATED = ("__pycache__", ".pyc", ".so")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built by setuptools from a copy of what Git has, with nothing that an earlier build left."""
    pytest.importorskip("setuptools", minversion="77", reason="the wheel is built by setuptools, without a network")
    folder = tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "shoal", "pyproject.toml", "README.md", "LICENSE"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    if listed.returncode:
        pytest.skip("this is no Git repository")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).exists():  # else deleted, and not committed yet
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "source" / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index",
         "--wheel-dir", folder, folder / "source"],
        check=True, capture_output=True, timeout=300,
    )  # fmt: skip
    [made] = folder.glob("shoal-*.whl")
    return made


def test_it_has_every_file_of_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    packed = {name for name in names if not name.split("/")[0].endswith(".dist-info")}
    source = {str(path.relative_to(wheel.parent / "source")) for path in (wheel.parent / "source" / "shoal").rglob("*")
              if path.is_file()}
    assert packed == source
    for name in ("shoal/py.typed", "shoal/spec/catalog/models.toml", "shoal/report/assets/style.css"):
        assert name in packed
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_its_metadata_is_that_of_the_project(wheel):
    with zipfile.ZipFile(wheel) as archive:
        [entry] = [name for name in archive.namelist() if name.endswith(".dist-info/entry_points.txt")]
        [about] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        points, text = archive.read(entry).decode(), archive.read(about).decode()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "shoal = shoal.__main__:command" in points
    assert f"Requires-Python: {project['requires-python']}" in text
    for extra in project["optional-dependencies"]:
        assert f"Provides-Extra: {extra}" in text


def test_it_works_in_a_clean_environment(wheel, tmp_path):
    """Installed into a new environment that has shoal from nowhere else; torch and the others come from this one."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True, timeout=120)
    python = tmp_path / "venv" / "bin" / "python"
    site = Path(subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True, capture_output=True, text=True,
    ).stdout.strip())  # fmt: skip
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    others = Path(pytest.__file__).parents[1]
    (site / "others.pth").write_text(f"{others}\n")  # after shoal, which is in the environment itself
    shoal = tmp_path / "venv" / "bin" / "shoal"

    def said(*words: str) -> str:
        done = subprocess.run(
            [shoal, *words], cwd=tmp_path, env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}, capture_output=True,
            text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert said("--version").startswith("shoal ")
    home = subprocess.check_output(
        [python, "-c", "import shoal; print(shoal.__file__)"], cwd=tmp_path, env={"PATH": "/usr/bin:/bin"}, text=True
    )
    assert Path(home.strip()).is_relative_to(site)
    assert "tokens" in said("estimate", "--model", "llama-3-8b", "--cluster", "8xH100", "--parallel.zero", "3")
    assert "#SBATCH --nodes=2" in said("launch", "--on", "slurm", "--run-folder", "runs/one", "--nodes", "2",
                                       "--parallel.dp", "2", "--dry-run")
    said("simulate", "--schedule", "1f1b", "--pp", "2", "--out", "page.html")
    assert (tmp_path / "page.html").stat().st_size > 10_000
