"""The training loop of one rank: steps, and around them metrics, validation, checkpoints and a clean stop."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from shoal.base.errors import UsageError
from shoal.base.section import plain
from shoal.engine.collectives.json_collectives import all_gather, world
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.collectives.ops import all_reduce, read
from shoal.engine.data.batches import Dataset
from shoal.engine.device import peak_memory
from shoal.engine.peak_flops import peak_flops
from shoal.spec.catalog import ModelShape
from shoal.spec.config import RunConfig
from shoal.training.bucket_size import settle_bucket_size
from shoal.training.fault_knobs import Handicaps, RankTimes, Watch, who_waits
from shoal.training.nonfinite_locator import blame
from shoal.training.records.display import Display
from shoal.training.records.histograms import Histograms
from shoal.training.records.metrics import MetricsWriter, StepMetrics
from shoal.training.records.profile import Profiler, profiled_steps
from shoal.training.records.timer import StepTimer
from shoal.training.resilience.events import write_event
from shoal.training.resilience.heartbeat import Beat, Phase
from shoal.training.resilience.reexecute import SilentCorruption
from shoal.training.resilience.replicas import ReplicasDiffer
from shoal.training.resilience.silent_failure_checks import Guard
from shoal.training.sample import sample
from shoal.training.state_manager import States
from shoal.training.step.engine import Engine, StepResult
from shoal.training.step.optimizer_step import NonFinite
from shoal.training.stop import StopRequests

SAMPLE_PROMPT = "def main("
SAMPLED_PARAMETERS = 1_000_000_000  # a larger model is not loaded whole on one host without being asked for


class Trainer:
    """Runs a training on this rank.

    Args:
        samples: "train" and "validation" data.
        folder: of the run, which is there.
        resume: continue from its newest good checkpoint.
        local_ranks: ranks on this machine.
        restarted: after a failure: begin with the first step where there is no checkpoint yet.
        beat: where this rank tells what it is at; None tells nobody.
        stop: requests to stop that came before its first step.
    """

    def __init__(
        self,
        config: RunConfig,
        shape: ModelShape,
        mesh: Mesh,
        samples: dict[str, Dataset],
        folder: Path,
        *,
        resume: bool,
        local_ranks: int,
        restarted: bool = False,
        beat: Beat | None = None,
        stop: StopRequests | None = None,
    ):
        self.config, self.shape, self.mesh, self.samples, self.folder = config, shape, mesh, samples, folder
        self.local_ranks, self.restarted, self.beat = local_ranks, restarted, beat or Beat()
        self.first = mesh.rank == 0
        self.display = Display(None if self.first else Console(quiet=True))
        self.begin = time.monotonic()
        if config.parallel.bucket_mb == "auto":
            config, found = settle_bucket_size(config, shape, mesh, samples["train"], folder, resume=resume)
            self.config, self.mesh = config, mesh.with_layout(config.parallel)
            self.display.note(found)
        self.engine = self._engine()
        self.engine.runtime.recorders.append(self.beat)
        data = samples["train"].fingerprint
        self.states = States(config, shape, self.engine, folder, data, fresh=not resume, report=self.display.note)
        restored = self.states.resume(restarted=restarted) if resume else None
        self.step = restored.step if restored else 0  # optimizer steps done
        self.source = restored.source if restored else ""
        self.handicaps = Handicaps.of(config.train, mesh.layout.world_size, begin=self.step, restarted=restarted)
        relaxed = config.parallel.sync != "all-reduce"
        self.watch = Watch(self.engine, self.handicaps) if self.handicaps.any or relaxed else None
        self.guard = Guard(self.engine, config.failover, self.step, restored.extra if restored else {})
        self.states.beside = self.guard.state
        self.beat.begun(self.step)
        profiled = profiled_steps(config.metrics, self.step, config.train.steps)
        self.profiler = Profiler(self.engine.runtime, mesh, profiled, folder, self.states.group) if profiled else None
        every = config.metrics.histograms
        self.histograms = Histograms(self.engine, every, folder) if every else None
        self.writer = MetricsWriter(folder, self.step, config.metrics, plain(config)) if self.first else None
        self.validation_loss: float | None = None
        self.validation_dropped: float | None = None
        self.stop = stop or StopRequests()

    # ---- the loop ----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train to the last step, or until a stop is asked for; the state is then saved."""
        self.stop.listen()
        self._banner()
        peak = self._peak()
        stopped, steps = False, self.config.train.steps
        timer = StepTimer(self.mesh.device)
        with self.display:
            while self.step < steps and not stopped:
                self.beat.phase(Phase.STEP)
                timer.start()
                if self.profiler:
                    self.profiler.before_step(self.step)
                try:
                    self.guard.before_step(self.step)
                    with self._recorded():
                        result = self.engine.step(self.step, stop=self.stop.count > 0)
                except NonFinite as error:
                    if error.untouched:  # the weights are still those of the step before
                        self.states.save(self.step, block=True)
                    raise NonFinite(blame(self.engine, self.step, error)) from None
                except SilentCorruption as error:
                    self.states.distrust(self.guard.proven)
                    self._happened("silent corruption", ranks=error.ranks)
                    raise
                timer.stop()
                if self.profiler:
                    self.profiler.after_step(self.step)
                self.step += 1
                self.beat.stepped(self.step, timer.all)
                if self._looked_and_went_back(result, timer):
                    continue
                stopped = result.stop and self.step < steps  # all ranks learn of it, and stop after the same step
                self._after_step(result, timer, peak, last=stopped or self.step == steps)
            self.beat.phase(Phase.END)
            self.states.save(self.step, block=True)
            self._close()
            if self.watch:
                every = all_gather(asdict(self.watch.times), world() if self.mesh.layout.world_size > 1 else None)
                self.display.console.print(who_waits({rank: RankTimes(**times) for rank, times in enumerate(every)}))
                self._tell_survivors(range(len(every)))

    def _tell_survivors(self, living: Iterable[int]) -> None:
        for line in self.handicaps.survivors(living):
            self.display.note(line)

    def leave(self) -> None:
        """Wait until no rank needs another any more."""
        dist.barrier()

    def conclude(self) -> None:
        """Rank 0's last words, for which no other rank has to wait: a sample, or how to go on."""
        if not self.first:
            return
        if self.step < self.config.train.steps:
            self.display.note(
                f"stopped after step {self.step}, which is saved; go on with: shoal train --resume {self.folder}"
            )
            return
        text = ""
        experts = self.shape.experts
        if experts is not None and experts.gate == "expert-choice":
            self.display.note("no sample: experts that choose among all tokens of a sequence cannot write one by one")
        elif self.shape.parameters() <= SAMPLED_PARAMETERS:
            seed = self.config.train.seed
            try:
                text = sample(self.folder, SAMPLE_PROMPT, tokens=160, temperature=0.7, seed=seed)
            except UsageError as error:  # the run is over and saved, whatever became of its files
                self.display.note(f"no sample: {error}")
        else:
            self.display.note(f"let it write: shoal sample {self.folder} '{SAMPLE_PROMPT}'")
        self.display.finish(
            folder=self.folder,
            seconds=time.monotonic() - self.begin,
            validation_loss=self.validation_loss,
            prompt=SAMPLE_PROMPT,
            sample=text.removeprefix(SAMPLE_PROMPT),
        )

    def _engine(self) -> Engine:
        return Engine(self.config, self.shape, self.mesh, self.samples["train"])

    def _recorded(self) -> AbstractContextManager:
        if self.histograms and self.histograms.due(self.step):
            return self.histograms.recording(self.step)
        return nullcontext()

    def _close(self) -> None:
        self.states.close()
        if self.profiler:
            self.profiler.close()
        if self.writer:
            self.writer.close()

    def _banner(self) -> None:
        length = self.config.data.sequence_length
        self.display.banner(
            model=self.config.model.name,
            parameters=self.shape.parameters(),
            tokens_per_step=self.config.train.global_batch * length,
            layout=self.config.parallel,
            device=str(self.mesh.device.type),
            precision=self.config.train.precision,
            threads=torch.get_num_threads(),
            folder=self.folder,
        )
        if self.step:
            self.display.note(f"resumed after step {self.step}, {self.source}")

    def _after_step(self, result: StepResult, timer: StepTimer, peak: float | None, *, last: bool) -> None:
        every = self.config.train.validate_every
        self.validation_loss = self.validation_dropped = None
        if result.skipped and self.engine.loss_scale:
            self.display.note(
                f"step {self.step} skipped: a gradient overflowed with loss scale {result.loss_scale:g}, "
                f"now {self.engine.loss_scale.value:g}"
            )
        if (every and self.step % every == 0) or self.step == self.config.train.steps:
            self.beat.phase(Phase.VALIDATE)
            self.validation_loss = self.engine.evaluate(self.samples["validation"])
            validated = self.engine.validated
            self.validation_dropped = validated.dropped if validated else None
            self.display.validation(self.validation_loss, self.step, self.validation_dropped)
        due = self.step % self.config.metrics.log_every == 0 or self.step == 1 or last
        if due or self.validation_loss is not None:
            self._log(result, timer, peak)
        self.display.progress(self.step, self.config.train.steps)
        every = self.config.checkpoint.every
        if every and self.step % every == 0 and not last:
            self.beat.phase(Phase.SAVE)
            self.states.save(self.step, block=False)
        every = self.config.failover.memory_every
        if every and self.step % every == 0 and not last:
            self.states.remember(self.step)

    # ---- around the step ---------------------------------------------------------------------------------------

    def _log(self, result: StepResult, timer: StepTimer, peak: float | None) -> None:
        most = torch.tensor(float(peak_memory(self.mesh.device)), device=self.mesh.device)
        memory = read(all_reduce(most, self.mesh.group("world"), dist.ReduceOp.MAX))
        steps, seconds = timer.lap()
        stalled = self.states.take_stalled()
        if not self.first:
            return
        length = self.config.data.sequence_length
        rate = steps * self.config.train.global_batch * length / seconds
        routed, foreseen = self.engine.routed(), self.engine.foreseen()
        metrics = StepMetrics(
            step=self.step,
            steps=self.config.train.steps,
            loss=result.loss,
            learning_rate=result.learning_rate,
            gradient_norm=None if result.skipped else result.gradient_norm,
            loss_scale=result.loss_scale if self.engine.loss_scale else None,
            skipped_steps=self.engine.loss_scale.skipped if self.engine.loss_scale else None,
            tokens_per_second=rate,
            tokens_per_second_per_rank=rate / self.mesh.layout.world_size,
            memory_bytes=int(memory),
            seconds_left=(self.config.train.steps - self.step) * seconds / steps,
            saving=stalled / (stalled + seconds),
            mfu=rate * self.shape.flops_per_token(length) / peak if peak else None,
            validation_loss=self.validation_loss,
            validation_dropped=self.validation_dropped,
        )
        if routed:
            metrics = replace(metrics, **routed.metrics())
        if foreseen:
            metrics = replace(metrics, **foreseen.metrics())
        if self.writer:
            self.writer.write(metrics)
        self.display.step(metrics)

    def _peak(self) -> float | None:
        """Peak FLOP/s of all ranks together, None where one does not know its own."""
        float8, compute = self.engine.float8, self.engine.policy.compute
        native = float8 is not None and float8.native(compute, self.mesh.device)
        kind = torch.float8_e4m3fn if native else compute
        own = peak_flops(kind, self.mesh.device, self.local_ranks)
        total = torch.tensor([own or 0.0, float(own is None)], dtype=torch.float64, device=self.mesh.device)
        rate, unknown = read(all_reduce(total, self.mesh.group("world")))
        return None if unknown else rate

    def _looked_and_went_back(self, result: StepResult, timer: StepTimer) -> bool:
        """Look for silent trouble after a step; whether the run has gone back to an earlier one.

        Raises:
            ReplicasDiffer: replicas do not hold the same; all since they last did is set aside.
        """
        try:
            slow = self.guard.after_step(self.step, timer.last)
        except ReplicasDiffer as error:
            self.states.distrust(self.guard.proven)
            self._happened("replicas differ", ranks=error.ranks)
            raise
        if slow:
            self.display.note(str(slow))
            self._happened("slowest", **asdict(slow))
        spike = self.guard.spike(result)
        if spike is None:
            return False
        self.display.note(f"step {self.step}: {spike}")
        self._happened("spike", **asdict(spike))
        return self.guard.may_roll_back() and self._roll_back()

    def _roll_back(self) -> bool:
        """Go back to the newest state before the last step's, and leave out the batches since; False if there is none.

        What is left out is saved at once, so that a restart leaves it out too.
        """
        last, skips = self.step - 1, self.engine.skips
        self.states.wait()
        found, refused = self.states.restore(before=max(0, last - self.config.failover.spike_margin))
        if found is None:
            self.display.note("\n  ".join(["there is no state before it to go back to", *refused]))
            return False
        left_out = skips.without(found.step, last)
        self.engine.skip(left_out)
        self.states.distrust(found.step)
        self.step = found.step
        self.guard.restore(self.step, found.extra)
        if self.writer:
            self.writer.close()
            self.writer = MetricsWriter(self.folder, self.step, self.config.metrics, plain(self.config))
        self.states.save(self.step, block=True)
        self.states.remember(self.step)
        self.display.note(
            f"back to the state after step {self.step}, {found.source}; the batches of steps {self.step + 1} to "
            f"{last + 1} are left out ({sum(stop - start for start, stop in left_out.ranges)} in all)"
        )
        self._happened("rolled back", skipped=left_out.ranges)
        return True

    def _happened(self, event: str, **values: Any) -> None:
        """Add to what happened to the run."""
        if self.first:
            write_event(self.folder, event, step=self.step, **values)
