"""Build the job of a run for SLURM, Kubernetes, Ray or SkyPilot, and submit it.

The job contains the run's config: what was submitted is what starts, however long the job waits. Restarts are the
cluster's; each finds the run by its folder (`shoal.launch.torch_elastic`).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import tomli_w

from shoal.base.errors import UsageError
from shoal.base.files import expanded
from shoal.launch.checks.folders import checkpoint_bytes, most_checkpoints
from shoal.launch.submit.ray_job import MAX_RESTARTS
from shoal.launch.torch_elastic import OWN_STORE
from shoal.spec.catalog import ModelShape
from shoal.spec.cluster_job import ClusterJob
from shoal.spec.config import RunConfig
from shoal.training.check import check

STORE_PORT = 29400  # torchrun's default for its rendezvous
JOIN_SECONDS = 3600  # in which all nodes must have started
GIB = 1 << 30


@dataclass(frozen=True)
class Submission:
    """What is submitted, and how.

    Attributes:
        file: name of the file; what its lines are follows from its suffix.
        text: the file's content.
        command: words that submit it; ``FILE`` and ``FOLDER`` represent its path and the folder that contains it alone.
    """

    file: str
    text: str
    command: tuple[str, ...]

    def send(self) -> None:
        """Submit it.

        Raises:
            UsageError: the program that submits is not installed, or has failed; its own message is on stderr.
        """
        tool = self.command[0]
        if shutil.which(tool) is None:
            raise UsageError(
                f"'{tool}' is not installed on this machine, so that nothing was submitted."
                f"\n  Submit from a machine that has it, or print the job with --dry-run and submit that: {self.show()}"
            )
        with TemporaryDirectory(prefix="shoal-submit-") as folder:
            file = Path(folder) / self.file
            file.write_text(self.text)
            names = {"FILE": str(file), "FOLDER": folder}
            code = subprocess.run([names.get(word, word) for word in self.command]).returncode
        if code:
            raise UsageError(f"'{tool}' exited with code {code}; its message is above. Nothing else was submitted.")

    def show(self) -> str:
        """Return the command with the file's own name."""
        return shlex.join({"FILE": self.file, "FOLDER": "."}.get(word, word) for word in self.command)


def submit(config: RunConfig, job: ClusterJob, *, dry_run: bool = False) -> Submission:
    """Submit a run to a cluster, which starts it and restarts it; return what was submitted.

    Args:
        dry_run: only return it.

    Raises:
        UsageError: the run or the job is impossible, or the program that submits is not installed or has failed.

    >>> config = RunConfig(parallel={"dp": 16}, train={"global_batch": 16})
    >>> job = ClusterJob(on="slurm", run_folder="runs/one", time="04:00:00")
    >>> [line for line in submit(config, job, dry_run=True).text.splitlines() if "time=" in line or "nodes=" in line]
    ['#SBATCH --nodes=2', '#SBATCH --time=04:00:00']
    """
    job.check()
    shape = check(_without_tokenizer(config))
    nodes, ranks = job.place_ranks(config.parallel)
    built = BUILDERS[job.on](_PlacedRun(config, job, shape, nodes, ranks))
    if not dry_run:
        built.send()
    return built


def _without_tokenizer(config: RunConfig) -> RunConfig:
    """Return the config to check: if this machine does not have the tokenizer, ``model.vocab`` stands for it.

    Raises:
        UsageError: neither is given.
    """
    name = config.data.tokenizer
    if config.model.module or name == "bytes" or os.path.lexists(expanded(name, "data.tokenizer")):
        return config
    if config.model.vocab is None:
        raise UsageError(f"data.tokenizer = '{name}' is not on this machine, which checks the run."
                         "\n  If the nodes have it, set model.vocab to its number of ids.")
    return config.replace(data={"tokenizer": "bytes"})


@dataclass(frozen=True)
class _PlacedRun:
    """A run and its job, with what the files of several clusters have in common."""

    config: RunConfig
    job: ClusterJob
    shape: ModelShape
    nodes: int
    ranks: int  # on each node

    @property
    def gpus(self) -> int | None:
        """GPUs of each node; None if the run needs none."""
        return None if self.config.train.device == "cpu" else self.ranks

    @property
    def toml(self) -> str:
        """The run's config without its defaults, in ASCII, as not every character may stand in YAML."""
        text = tomli_w.dumps(self.config.model_dump(mode="json", exclude_defaults=True, exclude_none=True)).strip()
        return re.sub(r"[^\x00-\x7f]", lambda match: f"\\U{ord(match[0]):08x}", text)

    def start_node(self, config: str, first: str, number: str) -> str:
        """Return the shell commands that run the ranks of one node: by shoal itself, or by torchrun on several nodes.

        Args:
            config: path of the run's TOML file, for a shell.
            first: address of the first node.
            number: variable of the shell with this node's number.
        """
        words = f"{config} --run-folder {shlex.quote(str(self.job.run_folder))} --auto-resume"
        if self.nodes == 1:
            return f"exec shoal train {words}"
        meet = f'"is_host=$(( {number} == 0 )),join_timeout={JOIN_SECONDS}"'
        return "\n".join([
            f"export {OWN_STORE}=1 # each attempt of torchrun has its own store",
            f"exec torchrun --nnodes {self.nodes} --nproc-per-node {self.ranks} --max-restarts {MAX_RESTARTS} \\",
            f"  --rdzv-backend c10d --rdzv-endpoint {first}:{STORE_PORT} --rdzv-id {self.job.name} \\",
            f"  --rdzv-conf {meet} \\",
            f"  -m shoal train {words}",
        ])  # fmt: skip


def _fill(template: str, run: _PlacedRun, **more: object) -> str:
    """Fill a file that a cluster reads, in Jinja's syntax."""
    import jinja2  # slow import

    jinja = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__), undefined=jinja2.StrictUndefined, trim_blocks=True,
        keep_trailing_newline=True,
    )  # fmt: skip
    jinja.filters["json"] = json.dumps
    return jinja.get_template(template).render(run=run, job=run.job, **more)


def _for_slurm(run: _PlacedRun) -> Submission:
    job, container = run.job, ""
    if job.image:
        mounts = '"$PWD:$PWD"' + (f",{job.volume}:{job.volume}" if job.volume else "")
        container = f' --container-image={job.image} --container-mounts={mounts} --container-workdir="$PWD"'
    text = _fill("slurm.sbatch", run, run_folder=shlex.quote(str(job.run_folder)), container=container)
    return Submission(f"{job.name}.sbatch", text, ("sbatch", "FILE"))


def _for_kubernetes(run: _PlacedRun) -> Submission:
    job = run.job
    size = 2 * most_checkpoints(run.config) * checkpoint_bytes(run.config, run.shape) // GIB + 1
    command = run.start_node("/config/run.toml", f"{job.name}-ranks-0-0.{job.name}", "JOB_COMPLETION_INDEX")
    text = _fill("kubernetes.yaml", run, volume=job.volume or f"{job.name}-runs", size=size, command=command)
    return Submission(f"{job.name}.yaml", text, ("kubectl", "apply", "--filename", "FILE"))


def _for_sky(run: _PlacedRun) -> Submission:
    job = run.job
    if run.gpus and not job.gpu:
        raise UsageError("--on sky needs --gpu: the type of GPU to rent, such as H100.")
    first = '"$(head -n1 <<< "$SKYPILOT_NODE_IPS")"'
    text = _fill("sky.yaml", run, command=run.start_node(f"~/{job.name}.toml", first, "SKYPILOT_NODE_RANK"))
    return Submission(f"{job.name}.yaml", text, ("sky", "jobs", "launch", "--yes", "FILE"))


def _for_ray(run: _PlacedRun) -> Submission:
    job, file = run.job, f"{run.job.name}.toml"
    words = (
        "python", "-m", "shoal.launch.submit.ray_job", "--config", file, "--run-folder", str(job.run_folder),
        "--nodes", str(run.nodes), "--ranks-per-node", str(run.ranks), "--cpus-per-rank", str(job.cpus_per_rank),
        "--gpus-per-node", str(run.gpus or 0),
    )  # fmt: skip
    return Submission(file, run.toml + "\n", ("ray", "job", "submit", "--working-dir", "FOLDER", "--", *words))


BUILDERS: dict[str, Callable[[_PlacedRun], Submission]] = {
    "slurm": _for_slurm, "k8s": _for_kubernetes, "ray": _for_ray, "sky": _for_sky,
}  # fmt: skip
