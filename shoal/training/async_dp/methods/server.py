"""Parameter server: workers pull weights and push gradients that update them (Li et al. 2014).

The server is shared memory with one shard per worker, each with a lock and an update counter; the pushing worker does
the server's work. Pushes start at different shards, so that workers rarely queue.

bulk-synchronous  (ps-bsp)    The gradients of a step are summed in the order of the workers, and the last one applies
                              one update. All wait for it: equal to the synchronous run up to rounding.
stale-synchronous (ps-ssp)    Each push is applied immediately. A worker that is s steps ahead of the slowest waits for
                              it (Ho et al. 2013, section 3).
asynchronous      (ps-async)  As stale-synchronous, without a bound.

The staleness of an update is the number of updates by other workers to the shard since its worker pulled. If it exceeds
1, the learning rate can be divided by it (Zhang et al. 2016, equation 4).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shoal.engine.collectives.shm.window import Window
from shoal.engine.optim.rule import Rule
from shoal.engine.optim.shards import Shards
from shoal.spec.config import RunConfig
from shoal.training.async_dp.methods.flat import Flat
from shoal.training.async_dp.methods.method import Method, MethodStates, States, move_weights

WAITS = "ps-bsp waits for every worker in every step"


class Server(Method):
    """Parameter-server method of one worker, with the server's shared memory.

    Args:
        build: builds an update rule for given shards.
        bound: see `staleness_bound`.
        aware: whether the learning rate is divided by the staleness.
        clip: maximum gradient norm of the sum in a bulk-synchronous step.
    """

    def __init__(
        self, window: Window, flat: Flat, optimizer: Rule, build: Callable[[Shards], Rule], *,
        bound: int | None, aware: bool, clip: float,
    ):
        super().__init__(window, flat, optimizer)
        self.bound, self.aware, self.clip = bound, aware, clip
        self.clips, self.together = bound != 0, bound == 0
        self.weights = self.shared()
        shards = move_weights(optimizer.shards, flat.weights, self.weights)
        self.parts = _balanced(shards, self.replicas)
        self.rules = {k: build(part) for k, part in sorted(shards.cut(lambda name, _: self.parts[name]).items())}
        for rule in self.rules.values():
            _share_states(rule, window)
        self.optimizer = next(iter(self.rules.values()))
        self.sums = self.shared(flat.gradients) if bound == 0 else []
        self.tokens = window.tensor(1, torch.float64)
        self.totals = window.tensor(3, torch.float64)  # loss sum, tokens and gradient norm of the newest step
        self._losses = window.tensor(1, torch.float64)  # loss sum of the step so far
        self._locks, self._versions = window.locks(self.replicas), window.counters(self.replicas)
        self._clocks, self._pushed = window.counters(self.replicas), window.counters(1)
        self._pulled = dict.fromkeys(self.rules, 0)
        self.made = torch.zeros(self.replicas, dtype=torch.int64)  # updates of each shard

    # ---- a step ------------------------------------------------------------------------------------------------

    def before(self, step: int) -> bool:
        """Wait for slower workers, then pull the weights.

        Raises:
            PeerLost: a worker has exited and the server is bulk-synchronous.
        """
        self.window.set(self._clocks + self.replica, step)
        everyone = range(self.replicas)
        if self.bound == 0:
            self.window.until(lambda: self._version(0) >= step, everyone, WAITS)
        elif (bound := self.bound) is not None:
            self.window.until(lambda: step - self.slowest() <= bound)
        for k in self.rules:
            with self.window.lock(self._locks + k):
                self._pulled[k] = self._version(k)
                for part in self.flat.parts:
                    if self.parts[part.name] == k:
                        part.view(self.flat.weights).copy_(part.view(self.weights))
        return True

    def wait_for_totals(self, step: int) -> tuple[float | None, float] | None:
        if not self.together:
            return None
        self.window.until(lambda: self._version(0) >= step, range(self.replicas), WAITS)
        loss, tokens, norm = self.totals.tolist()
        return loss / tokens if tokens else None, norm

    def slowest(self) -> int:
        """Return the number of steps done by the slowest living worker."""
        return min(self.window.get(self._clocks + worker) for worker in self.window.living())

    def _version(self, shard: int) -> int:
        return self.window.get(self._versions + shard)

    @torch.no_grad()
    def update(self, step: int, rate: float, tokens: float) -> None:
        if self.bound == 0:
            self._add(rate, tokens)
        else:
            self._push(rate)
        self.window.set(self._clocks + self.replica, step + 1)

    def _push(self, rate: float) -> None:
        """Update each shard immediately, starting at this worker's own."""
        found = []
        for k in sorted(self.rules, key=lambda k: (k - self.replica) % self.replicas):
            with self.window.lock(self._locks + k):
                version = self._version(k)
                stale = version - self._pulled[k]
                self.rules[k].resume_at(version)
                self.rules[k].step(rate / max(1, stale) if self.aware else rate)
                self.window.set(self._versions + k, version + 1)
            found.append(stale)
        self.staleness.add(sum(found) / len(found), max(found))

    def _add(self, rate: float, tokens: float) -> None:
        """Add to the sum of the step after the workers before this one; the last worker updates all shards."""
        everyone = range(self.replicas)
        self.window.until(lambda: self.window.get(self._pushed) == self.replica, everyone, WAITS)
        with self.window.lock(self._locks):
            torch._foreach_add_(self.sums, self.flat.gradients, alpha=tokens)
            self.tokens += tokens
            self._losses += self.loss
            pushed = self.window.get(self._pushed) + 1
            self.window.set(self._pushed, pushed % self.replicas)
            if pushed < self.replicas:
                return
            for total, gradients in zip(self.sums, self.flat.gradients, strict=True):
                torch.div(total, self.tokens.clamp(min=1).to(total.dtype), out=gradients)
                total.zero_()
            norm = sum(float(torch.linalg.vector_norm(g).double().square()) for g in self.flat.gradients) ** 0.5
            self.totals.copy_(torch.tensor((float(self._losses), float(self.tokens), norm)))
            self.tokens.zero_()
            self._losses.zero_()
            if self.clip and norm > self.clip:
                torch._foreach_mul_(self.flat.gradients, self.clip / norm)
            version = self._version(0)
            for k, rule in self.rules.items():
                rule.resume_at(version)
                rule.step(rate)
                self.window.set(self._versions + k, version + 1)
            self.staleness.add(0, 0)

    # ---- all together ------------------------------------------------------------------------------------------

    def settle(self, group: object) -> None:
        torch._foreach_copy_(self.flat.weights, self.weights)

    def start(self, step: int) -> None:
        """Start after ``step`` steps; the first worker writes the server's weights. States were loaded in place."""
        self.window.set(self._clocks + self.replica, step)
        if self.replica:
            return
        torch._foreach_copy_(self.weights, self.flat.weights)
        for k, made in enumerate(self.made.tolist()):
            self.window.set(self._versions + k, made)

    def states(self) -> MethodStates:
        """Return the server's moments and the number of updates of each shard; a worker keeps none."""
        self.made.copy_(torch.tensor([self._version(k) for k in range(self.replicas)]))
        states: States = self.updates()
        for rule in self.rules.values():
            for kind, parameters in rule.states().items():
                states.setdefault(kind, {}).update(parameters)
        return MethodStates(served=states)

    def restored(self) -> None:
        """Do nothing: `start` writes the window, and each update sets its rule."""


def staleness_bound(config: RunConfig) -> int | None:
    """Return the steps that a worker may be ahead of the slowest: 0 bulk-synchronous, None asynchronous."""
    return {"ps-bsp": 0, "ps-ssp": config.relaxed.staleness}.get(config.parallel.sync)


def _balanced(shards: Shards, servers: int) -> dict[str, int]:
    """Assign each parameter, in decreasing order of size, to the smallest shard so far."""
    sizes = dict.fromkeys(shards.parameters, 0)
    for shard in shards.shards:
        for part in shard.parts:
            sizes[part.name] += part.box.numel
    load, found = [0] * servers, {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        found[name] = load.index(min(load))
        load[found[name]] += sizes[name]
    return found


@torch.no_grad()
def _share_states(rule: Rule, window: Window) -> None:
    """Move the states of an element-wise rule into a window. All replicas must call this in the same order."""
    seen: dict[int, Tensor] = {}
    for parameters in rule.states().values():
        for pieces in parameters.values():
            for piece in pieces:
                base = piece.tensor if piece.tensor._base is None else piece.tensor._base
                seen.setdefault(base.data_ptr(), base)
    for base in seen.values():
        shared = window.tensor(base.numel(), base.dtype).view(base.shape)
        base.set_(shared)  # type: ignore[call-overload]  # torch takes a tensor too
