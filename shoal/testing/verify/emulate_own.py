"""Emulate an asynchronous pipeline of one's own modules in one process: each stage with the weights that the program
names, one micro-batch after the other through all stages, and one plain optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from shoal.engine.collectives.mesh import Mesh
from shoal.engine.optim.schedule import learning_rate
from shoal.engine.own.chain import Chain, find_chain
from shoal.engine.own.definition import OwnModel, load_own_model
from shoal.engine.own.formats import widen
from shoal.engine.own.links import LinkSeeds, StageLinks
from shoal.engine.own.optimizer import OwnRule
from shoal.engine.own.samples import OwnBatch, OwnDataset
from shoal.engine.own.stage import Statistics, draw_as
from shoal.engine.precision.policy import POLICIES
from shoal.pipeline.from_layout import build_layout_program
from shoal.pipeline.program import Op
from shoal.spec.config import RunConfig
from shoal.spec.layout import Layout
from shoal.testing.verify.emulate import get_gradient
from shoal.testing.verify.reference import build_shards, plain_optimizer

Tensors = dict[str, Tensor]


class EmulatedStage:
    """One stage, with weights of its own."""

    def __init__(self, own: OwnModel, chain: Chain, part: range, seed: int, device: torch.device):
        self.own, self.seed = own, seed
        self.module = own.build(seed).to(device).double().train()
        self.seeds = LinkSeeds(own, self.module, seed)
        self.links = StageLinks(chain, part, self.module, torch.float64, device)
        self.statistics = Statistics(self.module)
        self.trained = {name: p for name, p in self.module.named_parameters() if p.requires_grad}

    def forward(self, batch: OwnBatch, received: list[Tensor], weights: Tensors) -> object:
        """Return the stage's tensors for the next, or the loss, its terms and metrics."""
        with torch.no_grad():
            for name, p in self.trained.items():
                p.copy_(weights[name])
        self.statistics.rewind()
        draw_as(self.seed, batch)
        self.seeds.first = batch.first
        found = self.links.run(partial(self.own.compute, self.module, batch.values), received)
        self.statistics.collect()
        return found


def emulate_own_steps(
    config: RunConfig, steps: int, device: torch.device
) -> Iterator[tuple[float, float, Tensors, Tensors]]:
    """Yield the mean loss of each step, the mean gradient norm of its updates before clipping, the gradients of the
    last, and the weights and buffers after it, on the host."""
    own, layout, train = load_own_model(config.model.module), config.parallel, config.train
    program = build_layout_program(layout, layout.microbatches(train.global_batch))
    used = {(a.stage, a.microbatch): a.version for order in program.actions for a in order if a.op is Op.FORWARD}
    samples, n = OwnDataset(own, "train", train.seed), layout.micro_batch
    chain = find_chain(own, POLICIES["fp64"], train.seed, samples.batch(range(n)))
    stages = [EmulatedStage(own, chain, part, train.seed, device) for part in chain.assign(program)]
    model = own.build(train.seed).to(device).double()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rule, make, alone = config.optimizer, own.make_optimizer, Mesh(Layout(), 0)
    optimizer = OwnRule(rule, build_shards(model, rule), make) if make else plain_optimizer(model, rule)
    for p in trained.values():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad  # the optimizer may hold references to gradients
    for step in range(steps):
        versions, norms, total, counted = list[Tensors](), list[float](), 0.0, 0.0
        for stage in stages:
            stage.statistics.begin()
        for update in range(program.updates):
            versions.append({name: p.detach().clone() for name, p in trained.items()})
            terms = 0.0
            for m in (m for m, of in program.update_by_microbatch.items() if of == update):
                for replica in range(layout.dp):
                    first = step * train.global_batch + (m * layout.dp + replica) * n
                    batch = widen(samples.batch(range(first, first + n)).to(device), POLICIES["fp64"])
                    found: object = []
                    for i, stage in enumerate(stages):
                        found = stage.forward(batch, found, versions[used[i, m]])  # type: ignore[arg-type]
                    loss, count, _ = found  # type: ignore[misc]
                    loss.backward()  # type: ignore[has-type]
                    total, terms = total + loss.item(), terms + float(count)  # type: ignore[has-type]
            counted += terms
            for name, p in trained.items():
                get_gradient(p).zero_()
                for stage in stages:
                    if name in stage.trained and (mine := stage.trained[name]).grad is not None:
                        get_gradient(p).add_(mine.grad / (terms or 1.0))
                        mine.grad = None
            norms.append(math.sqrt(sum(float(get_gradient(p).square().sum()) for p in trained.values())))
            optimizer.step(
                own.schedule(step, train.steps) if own.schedule else learning_rate(step, train.steps, config.optimizer))
        after = {name: p.detach() for name, p in trained.items()}
        for stage in stages:
            stage.statistics.end(alone.group("dp"))
            after |= {name: b for name, b in stage.statistics.buffers.items() if stage.links.keeps(name)}
        gradients = {name: get_gradient(p) for name, p in trained.items()}
        yield total / (counted or 1.0), sum(norms) / len(norms), _copy_to_host(gradients), _copy_to_host(after)


def _copy_to_host(tensors: Tensors) -> Tensors:
    return {name: x.cpu().clone() for name, x in tensors.items()}
