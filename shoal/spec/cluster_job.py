"""The job of a run on a cluster: its size and what it asks of SLURM, Kubernetes, Ray or SkyPilot."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveInt, field_validator

from shoal.base.errors import UsageError
from shoal.base.options import reject_unused
from shoal.base.section import Section
from shoal.spec.layout import Layout

USUAL_RANKS_PER_NODE = 8

NOT_USED = {
    "slurm": ("gpu",),
    "k8s": ("time", "partition", "account", "gpu"),
    "ray": ("time", "partition", "account", "image", "volume", "gpu"),
    "sky": ("time", "partition", "account"),
}
"""Options that a cluster has no use for."""

SHARED = {"k8s": "the volume", "ray": "a file system that every node mounts", "sky": "the volume"}
"""What the parent folder of the run folder is, on clusters that start ranks in folders of their own."""


class ClusterJob(Section):
    """The job of a run on a cluster.

    >>> job = ClusterJob(on="slurm", run_folder="runs/one", ranks_per_node=4)
    >>> job.name, job.place_ranks(Layout(dp=8))
    ('one', (2, 4))
    """

    on: Literal["slurm", "k8s", "ray", "sky"]
    """Cluster: SLURM, Kubernetes, Ray or SkyPilot."""

    run_folder: Path
    """Run folder, which every node must see. The job starts this run, or resumes it if it exists."""

    nodes: PositiveInt | None = None
    """Number of nodes (default: as many as the layout's ranks need)."""

    ranks_per_node: PositiveInt | None = None
    """Ranks on each node, with one GPU each unless train.device is cpu (default: 8, or all ranks if fewer)."""

    cpus_per_rank: PositiveInt = 8
    """CPU cores of each rank."""

    gpu: str = Field(default="", pattern=r"^[\w.-]*$")
    """Type of GPU, such as H100 (sky)."""

    time: str = ""
    """Time limit of an allocation, such as 04:00:00 (slurm). The run saves and is queued again before it ends."""

    partition: str = Field(default="", pattern=r"^[\w.,-]*$")
    """Partition (slurm)."""

    account: str = Field(default="", pattern=r"^[\w.-]*$")
    """Account to charge (slurm)."""

    image: str = Field(default="", pattern=r"^[\w./:@#+-]*$")
    """Container image with shoal: required by k8s, optional on slurm (by enroot and pyxis) and sky."""

    volume: str = Field(default="", pattern=r"^[\w./-]*$")
    """Storage of the runs, mounted at the parent of the run folder: an existing claim (k8s; default: a new one) or a
    volume (sky). With an image on slurm: another folder to mount, at its own path."""

    @field_validator("time")
    @classmethod
    def _of_slurm(cls, value: str) -> str:
        if not re.fullmatch(r"(\d+(-\d+(:\d+){0,2})?|\d+(:\d+){1,2})?", value):
            raise ValueError("give minutes, hours:minutes:seconds or days-hours:minutes:seconds, such as 04:00:00")
        return value

    @property
    def name(self) -> str:
        """Name of the job, from the run folder's: lower-case letters, digits and hyphens, as Kubernetes wants it."""
        return re.sub(r"[^a-z0-9]+", "-", self.run_folder.name.lower()).strip("-")[:40].strip("-")

    def place_ranks(self, layout: Layout) -> tuple[int, int]:
        """Return the number of nodes and of ranks on each.

        Raises:
            UsageError: they do not make the layout's ranks.
        """
        ranks = layout.world_size
        each = self.ranks_per_node or (
            ranks // self.nodes if self.nodes and ranks % self.nodes == 0 else min(USUAL_RANKS_PER_NODE, ranks)
        )
        nodes = self.nodes or max(1, ranks // each)
        if nodes * each != ranks:
            sizes = [n for n in range(min(ranks, 16), 0, -1) if ranks % n == 0]
            fits = [f"--nodes {ranks // n} --ranks-per-node {n}" for n in sizes]
            raise UsageError(
                f"--nodes {nodes} x --ranks-per-node {each} = {nodes * each} ranks, but the layout "
                f"{layout.describe()} has {ranks}.\n  Fits: {', or '.join(fits[:3])}."
            )
        return nodes, each

    def check(self) -> None:
        """Reject options that this cluster does not use, and a job that lacks what it needs.

        Raises:
            UsageError: naming the option.
        """
        reject_unused(self, NOT_USED[self.on], f"--on {self.on} has no use for it")
        if not self.name or not self.name[0].isalpha():
            raise UsageError(
                f"--run-folder {self.run_folder}: the job is named after this folder, and '{self.run_folder.name}' "
                "does not begin with a letter.\n  Name it so, such as runs/one."
            )
        if not self.run_folder.is_absolute() and (shared := SHARED.get(self.on)):
            raise UsageError(
                f"--run-folder {self.run_folder}: ranks on {self.on} start in a folder of their own.\n  Give an "
                f"absolute path whose parent is {shared}, such as /runs/{self.run_folder.name}."
            )
        if self.on == "k8s" and not self.image:
            raise UsageError("--on k8s needs --image: the container image of the pods, such as that of Dockerfile.")
        if self.on == "sky" and not self.volume:
            raise UsageError("--on sky needs --volume: the volume of the run folder (`sky volumes apply` makes one).")
        if self.on == "slurm" and self.volume and not self.image:
            raise UsageError("--volume is mounted into a container, but there is no --image.\n  Leave it out.")
