"""Training loop of one rank, with metrics, validation, checkpoints and clean stops."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from shoal.base.section import plain
from shoal.engine.collectives.json_collectives import all_gather, world
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.collectives.ops import all_reduce, to_host
from shoal.engine.data.batches import CompleteDataset, Dataset, describe_repeats
from shoal.engine.device import peak_memory
from shoal.spec.catalog import ModelShape
from shoal.spec.config import RunConfig
from shoal.training.async_dp.engines import engine_class
from shoal.training.bucket_size import settle_bucket_size
from shoal.training.fault_knobs import FaultKnobs, RankTimes, TimedSteps, times_table
from shoal.training.inference.sample import sample_run
from shoal.training.nonfinite_locator import locate_nonfinite
from shoal.training.records.display import Display
from shoal.training.records.histogram_recorder import Histograms
from shoal.training.records.metrics import MetricsWriter, StepMetrics
from shoal.training.records.profiler import Profiler
from shoal.training.records.timer import StepTimer
from shoal.training.resilience.events import write_event
from shoal.training.resilience.heartbeat import Heartbeat, Phase
from shoal.training.resilience.replicas import SilentFailure
from shoal.training.resilience.silent_failure_checks import SilentFailureChecks
from shoal.training.run_folder import resume_command
from shoal.training.state_manager import StateManager
from shoal.training.step.late_step import StartedStep
from shoal.training.step.optimizer_step import NonFinite, StepResult
from shoal.training.stop import StopRequests


class Trainer:
    """Training loop of this rank.

    Args:
        samples: "train" and "validation" data.
        resume: whether to resume from the newest good checkpoint.
        restarted: whether this attempt follows a failure; without a checkpoint it then starts at the first step.
        beat: heartbeat of this rank; None for a rank without supervisor.
        stop: handler of stop requests, with any that arrived before the first step.
        validation: further data for validation, by name.

    Attributes:
        step: number of completed optimizer steps.
        source: description of the state that was resumed from.
        reads_late: whether results are read one step late, as no setting looks at each of them.
        unread: last step, if its result was not read yet.
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
        beat: Heartbeat | None = None,
        stop: StopRequests | None = None,
        validation: Mapping[str, CompleteDataset] | None = None,
    ):
        self.shape, self.samples, self.folder, self.local_ranks = shape, samples, folder, local_ranks
        self.beat, self.stop = beat or Heartbeat(), stop or StopRequests()
        self.first = mesh.rank == 0
        self.display = Display(None if self.first else Console(quiet=True), config.counted)
        self.begin = time.monotonic()
        if config.parallel.bucket_mb == "auto":
            config, found = settle_bucket_size(config, shape, mesh, samples["train"], folder, resume=resume)
            mesh = mesh.with_layout(config.parallel)
            self.display.note(found)
        self.config, self.mesh, relaxed = config, mesh, config.parallel.sync != "all-reduce"
        late = resume and not relaxed  # initial values are needed only if nothing can be restored
        kind = engine_class(config)
        make = partial(kind, initial=False) if late else kind
        self.engine = make(config, shape, mesh, samples["train"])
        self.engine.runtime.recorders.append(self.beat)
        self.states = StateManager(self.engine, folder, fresh=not resume, report=self.display.note)
        restored = self.states.resume(restarted=restarted) if resume else None
        if restored is None and late:
            self.engine.initialise()
        if restored is None and config.model.weights is not None:
            self.engine.read_weights(config.model.weights)
        self.step = restored.step if restored else 0
        self.source = restored.source if restored else ""
        self.knobs = FaultKnobs.read(config.testing, mesh.layout.world_size, begin=self.step, restarted=restarted)
        self.timed = TimedSteps(self.engine, self.knobs) if self.knobs.any or relaxed else None
        self.guard = SilentFailureChecks(self.engine, self.step, restored.extra if restored else {})
        self.states.beside = self.guard.state
        self.beat.begun(self.step)
        profiled = range(self.step + config.metrics.profile_after, config.train.steps)[: config.metrics.profile_steps]
        self.profiler = None
        if (config.metrics.profile or config.metrics.trace) and profiled:
            self.profiler = Profiler(
                self.engine.runtime, mesh, profiled, folder, self.states.group, trace=config.metrics.trace
            )
        every = config.metrics.histograms
        self.histograms = Histograms(self.engine, every, folder) if every else None
        self.writer: MetricsWriter | None = None
        self._open_writer()
        self.validation_loss: float | None = None
        self.validation, self.named_loss = validation or {}, dict[str, float]()
        self.timer = StepTimer(mesh.device)
        failover = config.failover
        looked_at = self.timed or self.profiler or self.histograms or failover.spike_factor or failover.stragglers_every
        self.reads_late = self.engine.starts_early and not looked_at
        self.unread: StartedStep | None = None
        self.peak: float | None = None  # FLOP/s, summed over all ranks; measured only when the first step is logged
        self.measured = False

    # ---- the loop ------------------------------------------------------------------------------------------------

    def run(self) -> bool:
        """Train to the last step or until a stop request, then save the state.

        Returns:
            Whether the ranks are to meet again in another layout, for which the state was only saved in memory.
        """
        self.stop.listen()
        self._show_banner()
        stopped, steps = False, self.config.train.steps
        with self.display:
            while self.step < steps and not stopped:
                self.beat.phase(Phase.STEP)
                self.timer.start()
                with self._failures_explained():
                    self.guard.before_step(self.step)  # may run the step twice without its update
                    if self.profiler:
                        self.profiler.before_step(self.step)
                    with self.histograms.recording(self.step) if self.histograms else nullcontext():
                        result = self._step()
                self.timer.stop(wait=result is not None)
                if self.profiler:
                    self.profiler.after_step(self.step)
                self.step += 1
                self.beat.stepped(self.step, self.timer.all)
                if result is None:
                    self.display.progress(self.step, steps)
                    continue
                if self._check_and_maybe_rollback(result):
                    continue
                stopped = result.stop and self.step < steps  # equal on all ranks, so all stop after the same step
                self._after_step(result, last=stopped or self.step == steps)
            if stopped:
                self.states.wait()  # a save in flight exchanges messages in this group, from a thread of its own
                if not any(all_gather(self.stop.ends, self.states.group)):
                    self.beat.phase(Phase.SAVE)
                    self.states.remember(self.step)
                    self.states.wait()
                    return True
            self.beat.phase(Phase.END)
            self.states.save_last(self.step)
            self._close()
            if self.timed:
                every = all_gather(asdict(self.timed.times), world() if self.mesh.layout.world_size > 1 else None)
                times = {rank: RankTimes(**spent) for rank, spent in enumerate(every)}
                self.display.console.print(times_table(times))
        return False

    def _step(self) -> StepResult | None:
        """Run a step. If it only starts, return None, or its result if something is due after it.

        The result of the step before is read first, in which a failure, or a request to stop, is found one step late.

        Raises:
            NonFinite: on every rank; `step` is then the number of steps before the failed one.
        """
        stop = self.stop.asked
        if not self.reads_late:
            return self.engine.step(self.step, stop=stop)
        before, started = self.unread, self.engine.start(self.step, stop=stop)
        try:
            asked = before is not None and before.read().stop
        except NonFinite:
            self.step -= 1
            raise
        due = asked or self._anything_due(self.step + 1)
        self.unread = None if due else started
        return started.read() if due else None

    def _anything_due(self, step: int) -> bool:
        """Return whether the result of a step is needed when it ends: something is logged, compared or saved."""
        config = self.config
        every = (
            config.metrics.log_every, config.train.validate_every, config.checkpoint.every,
            config.failover.memory_every, config.failover.check_replicas_every, config.failover.reexecute_every,
        )
        return step in (1, config.train.steps) or any(number and step % number == 0 for number in every)

    @contextmanager
    def _failures_explained(self) -> Iterator[None]:
        """If the enclosed code fails, save the last good state and locate the cause, or invalidate unproven states."""
        try:
            yield
        except NonFinite as error:
            if error.untouched:  # the step did not change the weights
                self.states.save(self.step, block=True)
            raise NonFinite(locate_nonfinite(self.engine, self.step, error)) from None
        except SilentFailure as error:
            self.states.invalidate(self.guard.proven)
            self._record_event(error.event, ranks=error.ranks)
            raise

    def _after_step(self, result: StepResult, *, last: bool) -> None:
        config = self.config
        if result.met:
            if result.skipped and self.engine.loss_scale:
                self.display.note(
                    f"step {self.step} skipped: a gradient overflowed with loss scale {result.loss_scale:g}, "
                    f"now {self.engine.loss_scale.value:g}"
                )
            self._validate()
            if last or self.step == 1 or self.step % config.metrics.log_every == 0 or self.validation_loss is not None:
                self._log(result)
        self.display.progress(self.step, config.train.steps)
        self.states.end_saved()
        if not result.met or last:
            return
        if self._due(config.checkpoint.every):
            self.beat.phase(Phase.SAVE)
            self.states.save(self.step, block=False)
        if self._due(config.failover.memory_every):
            self.states.remember(self.step)

    def _due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def _validate(self) -> None:
        self.validation_loss, self.named_loss = None, {}
        if self._due(self.config.train.validate_every) or self.step == self.config.train.steps:
            self.beat.phase(Phase.VALIDATE)
            self.validation_loss = self.engine.evaluate(self.samples["validation"])
            self.display.validation(self.validation_loss, self.step, self.engine.validated.get("dropped"))
            for name, value in (self.engine.validated.get("metrics") or {}).items():
                self.display.note(f"step {self.step}: validation {name} {value:.4g}", style="green")
            for name, samples in self.validation.items():
                found = self.engine.sum_complete(samples, self.config.train.validation_sequences)
                self.named_loss[name] = found.mean
                self.display.validation(found.mean, self.step, name=name)

    # ---- around the step -----------------------------------------------------------------------------------------

    def _log(self, result: StepResult) -> None:
        if not self.measured:
            self.peak, self.measured = self.engine.sum_peak_flops(self.local_ranks), True
        memory = self._gather_memory()
        steps, seconds = self.timer.lap()
        stalled, source_loss = self.states.take_stalled(), self.engine.source_losses.take()
        if not self.first:
            return
        scale = self.engine.loss_scale
        length, left = self.config.counted_per_sample, self.config.train.steps - self.step
        validated = self.engine.validated if self.validation_loss is not None else {}
        self._record_metrics(
            self.step,
            steps * self.config.train.global_batch * length / seconds,
            loss=result.loss if result.tokens else None,
            learning_rate=result.learning_rate,
            gradient_norm=None if result.skipped else result.gradient_norm,
            loss_scale=result.loss_scale if scale else None,
            skipped_steps=scale.skipped if scale else None,
            memory_bytes=max(memory),
            memory_by_rank=memory if len(memory) > 1 else None,
            seconds_left=left * seconds / steps,
            saving=stalled / (stalled + seconds),
            validation_dropped=validated.get("dropped"),
            source_validation_loss=validated.get("sources"),
            validation_metrics=validated.get("metrics"),
            source_loss=source_loss,
            source_tokens=self.engine.source_losses.tokens(self.step * self.config.train.global_batch, length),
            named_validation=self.named_loss or None,
            **self.engine.step_metrics(),
        )

    def _gather_memory(self) -> list[int]:
        """Return the peak memory of each rank in bytes."""
        each = torch.zeros(self.mesh.layout.world_size, dtype=torch.float64, device=self.mesh.device)
        each[self.mesh.rank] = peak_memory(self.mesh.device)
        return [int(number) for number in to_host(all_reduce(each, self.mesh.group("world")))]

    def _record_metrics(self, step: int, tokens_per_second: float, **values: Any) -> None:
        """Derive the remaining metrics of a step; write and show all."""
        flops = tokens_per_second * self.shape.flops_per_token(self.config.data.sequence_length)
        metrics = StepMetrics(
            step=step,
            steps=self.config.train.steps,
            tokens_per_second=tokens_per_second,
            tokens_per_second_per_rank=tokens_per_second / self.mesh.layout.world_size,
            mfu=flops / self.peak if flops and self.peak else None,
            validation_loss=self.validation_loss,
            **values,
        )
        if self.writer:
            self.writer.write(metrics)
        self.display.step(metrics)
        self.engine.logged(metrics)

    def _open_writer(self) -> None:
        """Open the records of metrics on rank 0, without later steps."""
        if not self.first:
            return
        if self.writer:
            self.writer.close()
        self.writer = MetricsWriter(
            self.folder, self.step, self.config.metrics, plain(self.config), self.display.note
        )

    def _check_and_maybe_rollback(self, result: StepResult) -> bool:
        """Check for silent failures after a step; return whether the run was rolled back."""
        with self._failures_explained():
            slow = self.guard.after_step(self.step, self.timer.last)
        if slow:
            self.display.note(str(slow))
            self._record_event("slowest", **asdict(slow))
        spike = self.guard.spike(result)
        if spike is None:
            return False
        self.display.note(f"step {self.step}: {spike}")
        self._record_event("spike", **asdict(spike))
        return self.guard.may_roll_back() and self._roll_back()

    def _roll_back(self) -> bool:
        """Restore the newest state before the last step's and skip the batches since; return False if none exists.

        The list of skipped batches is saved immediately, so that a restart skips them too.
        """
        last, skips = self.step - 1, self.engine.skips
        self.states.wait()
        found, refused = self.states.restore(before=max(0, last - self.config.failover.spike_margin))
        if found is None:
            self.display.note("\n  ".join(["no state before it to roll back to", *refused]))
            return False
        skipped = skips.without(found.step, last)
        self.engine.skip(skipped)
        self.states.invalidate(found.step)
        self.step = found.step
        self.guard.restore(self.step, found.extra)
        self._open_writer()
        self.states.save(self.step, block=True)
        self.states.remember(self.step)
        self.display.note(
            f"rolled back to the state after step {self.step}, {found.source}; the batches of steps {self.step + 1} to "
            f"{last + 1} are skipped ({sum(stop - start for start, stop in skipped.ranges)} in total)"
        )
        self._record_event("rolled back", skipped=skipped.ranges)
        return True

    def _record_event(self, event: str, **values: Any) -> None:
        if self.first:
            write_event(self.folder, event, step=self.step, **values)

    # ---- the beginning and the end -------------------------------------------------------------------------------

    def _show_banner(self) -> None:
        train = self.config.train
        self.display.banner(
            self.config, parameters=self.shape.parameters(), device=self.mesh.device.type,
            threads=torch.get_num_threads(), folder=self.folder,
        )
        for line in describe_repeats(self.samples["train"], train.steps * train.global_batch):
            self.display.note(line)
        asked, used = train.validation_sequences, self.engine.validation_sequences
        if used != asked:
            self.display.note(f"each validation takes {used} samples: {asked} rounded up to full passes")
        if self.step:
            self.display.note(f"resumed after step {self.step}, {self.source}")

    def _close(self) -> None:
        for opened in (self.states, self.profiler, self.writer):
            if opened:
                opened.close()

    def abandon(self) -> None:
        """End without the other ranks, one of which was lost; another trainer resumes from the newest state."""
        self.states.abandon()
        if self.writer:
            self.writer.close()

    def barrier(self) -> None:
        """Wait until all ranks have stopped exchanging data."""
        dist.barrier()

    def finalize(self) -> None:
        """Show on rank 0 a sample, or how to resume. Does not block the other ranks."""
        if not self.first:
            return
        if self.step < self.config.train.steps:
            self.display.note(
                f"stopped after step {self.step}, which is saved; resume with: "
                f"{resume_command(self.folder, self.config)}"
            )
            return
        prompt, sample = sample_run(
            self.folder, self.config, self.shape, self.samples["validation"], self.display.note
        )
        self.display.finish(
            folder=self.folder,
            seconds=time.monotonic() - self.begin,
            validation_loss=self.validation_loss,
            prompt=prompt,
            sample=sample,
        )
