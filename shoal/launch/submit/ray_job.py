"""Run the ranks of a training on a Ray cluster: Ray places them, and they are restarted from the newest checkpoint.

``python -m shoal.launch.submit.ray_job`` is the driver, the entrypoint of the job. It reserves a bundle of GPUs and CPU
cores for each node (a placement group, which Ray moves to other nodes when one is lost) and starts one actor in each.
An actor starts the node's ranks as child processes with torchrun's variables. When a rank or a node is lost, the driver
ends all actors and starts new ones, and the run resumes by itself.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pydantic import NonNegativeInt, PositiveInt

from shoal.base.errors import UsageError
from shoal.base.files import read_text
from shoal.base.options import parse
from shoal.base.polling import wait_until
from shoal.base.section import Section
from shoal.training.stop import PREEMPTED

POLL_SECONDS = 0.2
GRACE_SECONDS = 3.0  # in which the other ranks of a node may exit by themselves, after one has failed
MAX_RESTARTS = 100  # by torchrun and Ray, of all ranks at once; the cluster counts its own


class RayJobOptions(Section):
    """Start the ranks of a run on this Ray cluster, and restart them when some are lost."""

    config: Path
    """The run's TOML file, read by the driver."""

    run_folder: Path
    """Run folder, on a file system that every node mounts."""

    nodes: PositiveInt
    """Nodes, each with an actor."""

    ranks_per_node: PositiveInt
    """Ranks on each node."""

    cpus_per_rank: PositiveInt = 1
    """CPU cores of each rank."""

    gpus_per_node: NonNegativeInt = 0
    """GPUs of each node."""


class NodeRanks:
    """The ranks of one node, as child processes of a Ray actor. `stop` runs while `run` waits."""

    def __init__(self) -> None:
        self.ranks: list[subprocess.Popen[bytes]] = []

    def address(self) -> tuple[str, int]:
        """Return this node's address and a port that is free on it."""
        import ray

        with socket.socket() as found:
            found.bind(("", 0))
            return ray.util.get_node_ip_address(), found.getsockname()[1]

    def run(self, config: str, words: list[str], node: int, job: dict[str, int], master: tuple[str, int]) -> list[int]:
        """Run the ranks to their end and return their exit codes; if one fails, end the others.

        Args:
            config: content of the run's TOML file.
            words: further words of ``shoal train``.
            node: number of this node.
            job: nodes, ranks per node and cores per rank, as `RayJobOptions` names them.
            master: address and port at which the ranks meet.
        """
        each = job["ranks_per_node"]
        with tempfile.TemporaryDirectory(prefix="shoal-ray-") as folder:
            file = Path(folder) / "run.toml"
            file.write_text(config)
            for local in range(each):
                place = {
                    "RANK": node * each + local, "WORLD_SIZE": job["nodes"] * each, "LOCAL_RANK": local,
                    "LOCAL_WORLD_SIZE": each, "MASTER_ADDR": master[0], "MASTER_PORT": master[1],
                    "OMP_NUM_THREADS": job["cpus_per_rank"],
                }  # fmt: skip
                environment = {**os.environ, **{name: str(value) for name, value in place.items()}}
                command = [sys.executable, "-m", "shoal", "train", str(file), *words]
                self.ranks.append(subprocess.Popen(command, env=environment))
            while any(rank.poll() is None for rank in self.ranks):
                if any(rank.returncode for rank in self.ranks):
                    self._end()
                time.sleep(POLL_SECONDS)
            return [rank.returncode for rank in self.ranks]

    def _end(self) -> None:
        """Wait a little for the ranks that are left, then kill them."""
        wait_until(lambda: all(rank.poll() is not None for rank in self.ranks), GRACE_SECONDS, POLL_SECONDS)
        self.stop(signal.SIGKILL)

    def stop(self, signum: int) -> None:
        """Send a signal to every rank that runs."""
        for rank in self.ranks:
            if rank.poll() is None:
                rank.send_signal(signum)


class RayJob:
    """The driver: attempts to run all ranks, until they are done, have been asked to stop, or have bad input."""

    def __init__(self, options: RayJobOptions):
        self.options, self.config = options, read_text(options.config)
        self.asked = False  # to stop
        self.actors: list[Any] = []

    def run(self) -> int:
        """Return 0 after the last step, 75 after a stop that was asked for, 2 for bad input, else the last failure."""
        import ray

        options = self.options
        bundle = {"CPU": float(options.ranks_per_node * options.cpus_per_rank), "GPU": float(options.gpus_per_node)}
        bundle = {name: count for name, count in bundle.items() if count}
        group = ray.util.placement_group([bundle] * options.nodes, strategy="SPREAD")
        print(f"waiting for {options.nodes} nodes with {bundle}", flush=True)
        code = 1
        try:
            for attempt in range(1 + MAX_RESTARTS):
                while not group.wait(timeout_seconds=1):
                    if self.asked:
                        return PREEMPTED
                code = self._attempt(group, bundle)
                if code in (0, 2) or self.asked:
                    return code
                print(f"attempt {attempt + 1} ended with code {code}; starting the ranks again", flush=True)
            return code
        finally:
            ray.util.remove_placement_group(group)

    def _attempt(self, group: Any, bundle: dict[str, float]) -> int:
        """Start one actor in each bundle, wait for their ranks, and end them; return the code of the failure, or 0."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        options = self.options
        words = ["--run-folder", str(options.run_folder), "--auto-resume"]
        actor = ray.remote(NodeRanks)
        self.actors = [
            actor.options(
                num_cpus=bundle["CPU"], num_gpus=bundle.get("GPU", 0), max_concurrency=2,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node),
            ).remote()
            for node in range(options.nodes)
        ]  # fmt: skip
        lost = (ray.exceptions.RayActorError, ray.exceptions.WorkerCrashedError)
        job = options.model_dump(include={"nodes", "ranks_per_node", "cpus_per_rank"})
        try:
            master = ray.get(self.actors[0].address.remote())
            waiting = [
                each.run.remote(self.config, words, node, job, master) for node, each in enumerate(self.actors)
            ]
            codes: list[int] = []
            warned = False
            while waiting and not any(code not in (0, PREEMPTED) for code in codes):
                if self.asked and not warned:
                    warned = True
                    for each in self.actors:
                        each.stop.remote(signal.SIGTERM)
                done, waiting = ray.wait(waiting, timeout=1)
                codes += [code for ended in done for code in ray.get(ended)]
        except lost as error:
            print(f"a node was lost: {error}", flush=True)
            return 1
        finally:
            self._end_actors(lost)
        return max(codes, key=lambda code: (code == 2, code not in (0, PREEMPTED), code))

    def _end_actors(self, lost: tuple[type[Exception], ...]) -> None:
        import ray

        for each in self.actors:
            try:
                ray.get(each.stop.remote(signal.SIGKILL), timeout=GRACE_SECONDS)
            except (*lost, ray.exceptions.GetTimeoutError):
                pass
            ray.kill(each)

    def stop(self, *_: object) -> None:
        """Ask the ranks to save and exit: the handler of SIGTERM, which ``ray job stop`` sends."""
        self.asked = True


def main(args: list[str]) -> int:
    """Run the driver."""
    try:
        job = RayJob(parse("ray_job", RayJobOptions, args))
        try:
            import ray
        except ImportError:
            raise UsageError("Ray is not installed.\n  Install it: pip install 'shoal[ray]'.") from None
        ray.init(ignore_reinit_error=True)
        signal.signal(signal.SIGTERM, job.stop)
        return job.run()
    except UsageError as error:
        print(f"shoal: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
