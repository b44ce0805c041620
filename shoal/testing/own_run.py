"""A run of a model of one's own, defined in Python: train it and verify its layout."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import PositiveInt
from torch import Tensor, nn
from torch.utils.data import default_collate

from shoal.base.calls import check_arguments
from shoal.base.errors import UsageError
from shoal.engine.checkpoint.load import load_checkpoint
from shoal.engine.checkpoint.manifest import newest
from shoal.engine.own.definition import PICKLED, OwnModel, Samples, save_own_model
from shoal.engine.own.optimizer import MakeOptimizer
from shoal.engine.sharding.loss import LossPlan
from shoal.launch.rank_env import detect_rank_env
from shoal.launch.train import train
from shoal.pipeline.partition import PipeDreamPartition
from shoal.planning.auto.own_loss import with_plan
from shoal.planning.own_estimate import OwnEstimate, estimate_own_model
from shoal.planning.own_search import partition_own_model, plan_own_model
from shoal.spec.catalog.clusters import cluster as find_cluster
from shoal.spec.config import RUN_FILE, OptimizerConfig, RunConfig, build_config, load_config
from shoal.spec.layout import Layout
from shoal.testing.own_dry_run import OwnDryRun, dry_run_own_model
from shoal.testing.verify.verify import Verification, verify
from shoal.training.records.metrics import StepMetrics, read_metrics
from shoal.training.run_folder import get_checkpoint_folder


def AdamW(lr: float = 1e-3, **fields: Any) -> OptimizerConfig:
    """Return the settings of AdamW (Loshchilov & Hutter 2019), with the fields of section [optimizer].

    >>> AdamW(lr=3e-4, clip_norm=0.5).learning_rate
    0.0003
    """
    return build_config({"optimizer": {"name": "adamw", "learning_rate": lr} | fields}, source="AdamW").optimizer


@dataclass(frozen=True)
class RunResult:
    """A run that has ended.

    Attributes:
        folder: its run folder.
        code: exit code, as of `shoal.train`.
        metrics: one record for each logged step.
        own: what was trained.
    """

    folder: Path
    code: int
    metrics: list[StepMetrics] = field(repr=False)
    own: OwnModel = field(repr=False)

    def weights(self) -> dict[str, Tensor]:
        """Return the newest saved weights and buffers, as ``load_state_dict`` takes them: tied ones by each name.

        Raises:
            UsageError: nothing was saved.
        """
        found = newest(get_checkpoint_folder(load_config(self.folder / RUN_FILE), self.folder))
        if found is None:
            raise UsageError(f"{self.folder} has no checkpoint.")
        loaded = load_checkpoint(str(found.path), prefix="model.")
        loaded = {name.removeprefix("model."): value for name, value in loaded.items()}
        module, first = self.own.build_empty(), dict[Tensor, str]()
        for named in (module.named_parameters, module.named_buffers):
            for name, value in named(remove_duplicate=False):
                if (saved := first.setdefault(value, name)) in loaded:  # once, by its first name
                    loaded[name] = loaded[saved]
        return loaded


class Run:
    """Training of any module on any number of ranks, which `train` starts, or which torchrun or SLURM started.

    Functions and samples reach the ranks with cloudpickle, so they may be of a notebook.

    Args:
        model, loss, data, validation, collate, blocks, tensor_parallel, make_optimizer, schedule, on_step,
            on_validation, on_save, pipeline, expert_parallel: see `OwnModel`.
        layout: data, tensor and pipeline parallelism, ZeRO and the size of a micro-batch; "auto" for the fastest that
            fits on the ``cluster``, by `plan_own_model`, which is printed.
        cluster: name of a cluster, for "auto" and estimates (default: 8xH100).
        optimizer: section [optimizer], or its fields as a dict; `AdamW` makes one.
        global_batch: samples of a step (default: one micro-batch for each replica).
        name: name of the model, in the records of the run.
        sections: other sections of the config and their fields, such as ``checkpoint={"every": 100}``.

    Raises:
        UsageError: a setting is wrong.

    >>> import shoal, torch
    >>> run = shoal.Run(
    ...     model=lambda: torch.nn.Linear(4, 1),
    ...     loss=lambda model, batch: ((model(batch) - batch.sum(1, keepdim=True)).square().sum(), len(batch)),
    ...     data=torch.randn(64, 4), layout=shoal.Layout(dp=2, zero=1, micro_batch=8), optimizer=shoal.AdamW(lr=0.1),
    ... )
    >>> trained = run.train(steps=40)
    >>> trained.metrics[-1].loss < trained.metrics[0].loss
    True
    >>> sorted(trained.weights())
    ['bias', 'weight']
    """

    def __init__(
        self,
        model: Callable[[], nn.Module],
        loss: Callable[[Any, Any], tuple[Tensor, Any]],
        data: Samples,
        validation: Samples | None = None,
        *,
        layout: Layout | Literal["auto"] | None = None,
        cluster: str | None = None,
        optimizer: OptimizerConfig | dict[str, Any] | None = None,
        global_batch: int | None = None,
        collate: Callable[[list[Any]], Any] = default_collate,
        blocks: tuple[str, ...] = (),
        tensor_parallel: Mapping[str, str] | LossPlan | Literal["auto"] | None = None,
        make_optimizer: MakeOptimizer | None = None,
        schedule: Callable[[int, int], float] | None = None,
        on_step: Callable[[StepMetrics], object] | None = None,
        on_validation: Callable[[StepMetrics], object] | None = None,
        on_save: Callable[[int, Path], object] | None = None,
        pipeline: tuple[str, ...] | Literal["auto"] = (),
        expert_parallel: Mapping[str, str] | None = None,
        name: str = "own",
        **sections: dict[str, Any],
    ):
        self.own = OwnModel(model, loss, data, validation, collate, blocks, tensor_parallel, make_optimizer, schedule,
                            on_step, on_validation, on_save, pipeline, expert_parallel)
        if layout not in (None, "auto") and not isinstance(layout, Layout):
            raise UsageError(f"Run: layout = {layout!r}.\n  Give shoal.Layout(dp=2) or another, or 'auto'.")
        if optimizer is not None and not isinstance(optimizer, (OptimizerConfig, dict)):
            raise UsageError(f"Run: optimizer = {optimizer!r}.\n  Give shoal.AdamW(lr=0.001), a dict of section "
                             "[optimizer] such as {'name': 'sgd'}, or make_optimizer= with one of torch.optim.")
        chosen = layout if isinstance(layout, Layout) else Layout()
        if layout == "auto" and not (cluster and global_batch):
            raise UsageError("Run: layout 'auto' needs cluster and global_batch.\n  Give both, such as "
                             "cluster='8xH100'.")
        batch = {"global_batch": global_batch or chosen.dp * chosen.micro_batch}
        train = sections.pop("train", {})
        given = {"train": batch | train if isinstance(train, Mapping) else train, "model": {"name": name}}
        if isinstance(optimizer, dict):
            given["optimizer"] = optimizer
        if "parallel" in sections:
            raise UsageError("Run: section [parallel] is given.\n  Give layout= in its place.")
        rule = {"optimizer": optimizer} if isinstance(optimizer, OptimizerConfig) else {}
        self.config = build_config(given | sections, source="Run").replace(parallel=chosen, **rule)
        self.cluster = cluster or "8xH100"
        find_cluster(self.cluster)  # refuses an unknown name
        if layout == "auto":
            with self._written() as config:
                found = plan_own_model(config, self.cluster)
                self.own = found.best
            self.config = self.config.replace(parallel=found.fitting[0].config.parallel)
            if (member := detect_rank_env()) is None or member.rank == 0:
                why = f"\n  operators are not split: {found.unsplit}" if found.unsplit else ""
                print(f"layout auto: {found.fitting[0].summary()}{why}")

    def __repr__(self) -> str:
        return f"<Run: {self.config.model.name} on {self.config.parallel.describe()}>"

    @check_arguments
    def train(
        self, steps: PositiveInt, *, folder: str | Path | None = None, resume: str | Path | None = None
    ) -> RunResult:
        """Train up to a step, in a new run folder (default: under ``runs/``) or in that of a run to resume.

        Raises:
            UsageError: the run is impossible.
        """
        if detect_rank_env() is not None and folder is None and resume is None:
            raise UsageError("Run.train: ranks that torchrun or SLURM started need the name of a run folder.\n"
                             "  Give folder=.")
        if steps < 1:
            raise UsageError(f"Run.train: steps = {steps!r}.\n  Give the step to train up to, 1 or more.")
        where = [] if folder is None and resume is None else [Path(folder or resume or "")]
        with self._written() as config:
            planned = with_plan(config.replace(train={"steps": steps}), Path(config.model.module).parent, self.cluster)
            code = train(planned, run_folder=folder, resume=resume, started=where.append)
        return RunResult(where[0], code, read_metrics(where[0]), self.own)

    @check_arguments
    def verify(self, layout: Layout | None = None, *, steps: PositiveInt = 3, show: bool = True) -> Verification:
        """Compare a layout (default: the run's) with plain PyTorch and with one device, in float64.

        Raises:
            UsageError: the run is impossible.
        """
        with self._written(layout) as config:
            return verify(config, steps=steps, show=show)

    @check_arguments
    def estimate(self, layout: Layout | None = None, *, cluster: str | None = None) -> OwnEstimate:
        """Estimate memory and time of a layout on a cluster (default: the run's), from one micro-batch without values.

        Raises:
            UsageError: the run is impossible, or the cluster is not known.
        """
        with self._written(layout) as config:
            return estimate_own_model(config, cluster or self.cluster)

    @check_arguments
    def dry_run(
        self, layout: Layout | None = None, *, cluster: str | None = None, rank: int = 0, steps: PositiveInt = 4,
        measure: bool = False,
    ) -> OwnDryRun:
        """Run the first steps of one rank of a layout on fake tensors, and count its memory, FLOPs and transfers.

        Args:
            rank: the rank to count.
            steps: number of first steps to count.
            measure: also start all ranks on this machine (at most 8), and count this rank on real tensors.

        Raises:
            UsageError: as `estimate`; the rank does not exist; or the module reads values, of which there are none.
        """
        with self._written(layout) as config:
            return dry_run_own_model(config, cluster or self.cluster, rank=rank, steps=steps, measure=measure)

    @check_arguments
    def partition(self, *, cluster: str | None = None, show: bool = True) -> PipeDreamPartition:
        """Return the stages and replicas that PipeDream would choose for the modules of the pipeline, and print them.

        Training has as many replicas of each stage; this is what the published partition would gain.

        Raises:
            UsageError: there is no pipeline, or the cluster is not known.
        """
        with self._written() as config:
            found, names = partition_own_model(config, cluster or self.cluster)
        if show:
            print(*found.lines(names), sep="\n")
        return found

    @contextmanager
    def _written(self, layout: Layout | None = None) -> Iterator[RunConfig]:
        """Yield the config on a layout (default: the run's), with the definition written into a temporary folder."""
        with tempfile.TemporaryDirectory(prefix="shoal-own-") as folder:
            file = Path(folder) / f"own{PICKLED}"
            save_own_model(self.own, file)
            yield self.config.replace(model={"module": str(file)}, parallel=layout or self.config.parallel)
