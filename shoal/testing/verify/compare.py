"""The verdict: what the ranks found against what one device computed, as relative errors, in the order of a step."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from shoal.engine.models.experts.router import SUMS
from shoal.engine.models.mixture_of_depths import COUNTS
from shoal.spec.layout import Layout
from shoal.spec.number_formats import FORMATS, FP64
from shoal.testing.verify.rank import RankReport
from shoal.testing.verify.reference import StepFacts, parameter_of
from shoal.testing.verify.routing_trace import added
from shoal.testing.verify.trace import traced_modules


class Tolerance(NamedTuple):
    """The largest relative errors that rounding explains.

    Attributes:
        gradient: of gradients, activations, loss and gradient norm, and of weights after plain SGD.
        adaptive: of weights after the run's own optimizer. Adam divides each gradient by its own size, so where a
            gradient is all rounding (a key's bias), so is the update.
    """

    gradient: float
    adaptive: float


# fp64: five orders above what random layouts show (docs/verify.md). The others: bounds on what rounding does to
# small models, chosen with room and not fitted; a fault that hides below them shows in fp64.
_TOLERANCES = {
    "float64": Tolerance(gradient=1e-9, adaptive=1e-9),
    "float32": Tolerance(gradient=2e-4, adaptive=1e-2),
    "float16": Tolerance(gradient=5e-2, adaptive=2e-1),
    "bfloat16": Tolerance(gradient=2e-1, adaptive=2e-1),
}
# Where rounding in bf16 takes a number over the border between two of float8's, it is off by an eighth or a quarter.
_FLOAT8 = Tolerance(gradient=5e-1, adaptive=5e-1)
TOLERANCES = {
    name: _TOLERANCES[f.compute.name] if f.products == "compute" or f.compute == FP64 else _FLOAT8
    for name, f in FORMATS.items()
}

PLAIN = "plain-sgd"
"""The rule that hides nothing: a step is the gradient. Every other is the run's own."""

# Adafactor divides by roots of row and column means with next to nothing added (1e-30), where Adam adds 1e-8: a row of
# the gradient that is all but rounding is made as large as any other. Sophia-H divides by differences of gradients.
AMPLIFIED = {"adafactor": 1e4, "sophia-h": 1e2}

# The error of a tensor is relative to its own largest element, but to no less than this part of the largest element of
# any parameter's: some gradients are zero in exact arithmetic (softmax does not see a bias on the keys), and the error
# of a zero has no scale. Weights need the larger floor since biases start at zero.
FLOORS = {"gradient": 1e-4, "weight": 1e-2, "in use": 1e-2}

# One expert's part of a parameter: to no less than this part of the largest element of all of them. An expert that has
# no tokens has a gradient of zero to the bit; that of one which the gate hardly weighs is small.
EXPERT_FLOOR = 1e-6

# In the order in which a step passes them, and so in which a difference is looked for.
PHASES = (
    "structure",
    "samples",
    "forward",
    "routing",
    "loss",
    "backward",
    "gradient",
    "gradient norm",
    "weight",
    "in use",
)

# What routers have counted, by attribute of `StepFacts`: (in words, columns, whether it is a number of tokens).
_COUNTED = {
    "routing": (
        ("tokens dropped", slice(0, 1), True), ("balance and z loss", slice(1, SUMS), False),
        ("tokens of each expert", slice(SUMS, None), True),
    ),
    "depths": (
        ("tokens foreseen to pass through layers", slice(0, COUNTS), True),
        ("loss of what foresees it", slice(COUNTS, None), False),
    ),
}


@dataclass(frozen=True)
class Finding:
    """One difference beyond tolerance.

    Attributes:
        step: -1 for what differs before any step.
        rule: the optimizer's name.
        phase: one of `PHASES`, or "failure" where a rank raised.
        place: the module or parameter; "" for what concerns all.
        error: relative.
        ranks: where, in words, worst first.
        text: one line in words.
    """

    step: int
    rule: str
    phase: str
    place: str
    error: float
    ranks: tuple[str, ...]
    text: str


@dataclass
class Verdict:
    """All that one verification found.

    Attributes:
        table: the largest relative error by (row, column); see `row_of`.
        findings: the differences beyond tolerance, in the order in which a step reaches them.
    """

    table: dict[tuple[str, str], float] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    @property
    def worst_gradient(self) -> float:
        """The largest relative error of any gradient."""
        return max((e for (row, column), e in self.table.items() if column == "gradient"), default=0.0)


def row_of(parameter: str) -> str:
    """The kind of module that a parameter belongs to, a row of the table.

    >>> row_of("layers.12.attention.q.weight"), row_of("layers.0.mlp_norm.weight"), row_of("embed.token.weight")
    ('attention q', 'norms', 'embed token')
    """
    if "norm" in parameter:
        return "norms"
    return re.sub(r"^layers\.\d+\.|\.(weight|bias)$", "", parameter_of(parameter)).replace(".", " ")


def judge(
    layout: Layout,
    layers: int,
    precision: str,
    facts: dict[str, list[StepFacts]],
    reports: list[RankReport],
) -> Verdict:
    """Compare what every rank found with what one device computed.

    Args:
        layers: of the whole model.
        facts: of the reference, by rule, for each step.
        reports: of the ranks, in order.
    """
    verdict = Verdict()
    parameters = [name for name in next(iter(facts.values()))[0].gradients if name == parameter_of(name)]
    verdict.findings += _coverage(parameters, reports)
    for rule, steps in facts.items():
        for step, fact in enumerate(steps):
            judgement = _Step(rule, step, precision, fact, layers, reports, verdict)
            judgement.samples(layout)
            judgement.trace()
            judgement.routing()
            judgement.loss()
            judgement.parameters()
    order = {rule: i for i, rule in enumerate(facts)}
    verdict.findings.sort(key=lambda f: (order.get(f.rule, -1), f.step, PHASES.index(f.phase)))
    return verdict


def _coverage(parameters: list[str], reports: list[RankReport]) -> list[Finding]:
    """Every element of every parameter has exactly one primary owner."""
    held = [piece for report in reports for piece in report.held]
    shapes = {name: whole for name, whole, _, _ in held}
    found = []
    for parameter in parameters:
        text = f"{parameter} is on no rank"
        if parameter in shapes:
            owners = torch.zeros(shapes[parameter], dtype=torch.int16)
            for name, _, box, primary in held:
                if primary and name == parameter:
                    owners[box.slices] += 1
            none, many = int((owners == 0).sum()), int((owners > 1).sum())
            if not none and not many:
                continue
            text = f"{parameter}: {none} elements have no owner, {many} have several"
        found.append(Finding(-1, "", "structure", parameter, math.inf, (), text))
    return found


class _Step:
    """The comparison of one step of one rule, which adds its findings to the verdict."""

    def __init__(
        self, rule: str, step: int, precision: str, fact: StepFacts, layers: int, reports: list[RankReport],
        verdict: Verdict,
    ):
        self.rule, self.step, self.fact, self.verdict = rule, step, fact, verdict
        self.precision, self.tolerance = precision, TOLERANCES[precision]
        self.adaptive = rule != PLAIN
        # From the second step on, weights that were amplified rounding are what is computed with.
        self.amplified = AMPLIFIED.get(rule, 1.0)
        self.gradient = self.tolerance.gradient * (self.amplified if step else 1.0)
        self.modules = traced_modules(layers)
        self.reports = reports
        self.ranks = [(report.where, report.steps[rule, step]) for report in reports]

    def _find(self, phase: str, place: str, errors: dict[str, float], what: str, allowed: float) -> None:
        """Note a finding if an error is beyond what is allowed; ``errors`` by rank in words."""
        beyond = (where for where, error in errors.items() if not error <= allowed)
        wrong = sorted(beyond, key=lambda where: errors[where], reverse=True)
        if wrong:
            error = errors[wrong[0]]
            others = f" and {len(wrong) - 1} more of {len(self.ranks)} ranks" if len(wrong) > 1 else ""
            text = f"step {self.step} with {self.rule}, {what}, on {wrong[0]}{others}: relative error {error:.1e}"
            self.verdict.findings.append(Finding(self.step, self.rule, phase, place, error, tuple(wrong), text))

    def _note(self, row: str, column: str, errors: dict[str, float]) -> None:
        """Keep the largest error, but for gradients of weights that were amplified rounding already."""
        if column != "gradient" or self.gradient == self.tolerance.gradient:
            table = self.verdict.table
            table[row, column] = max(*errors.values(), table.get((row, column), 0.0))

    def samples(self, layout: Layout) -> None:
        """Each sample of the global batch is read by exactly one replica, and by all of its ranks alike."""
        everything = list(range(len(self.fact.tokens)))
        read: dict[int, list[int]] = {}
        for report in self.reports:
            mine = sorted(i for batch in report.steps[self.rule, self.step].samples for i in batch)
            if read.setdefault(report.replica, mine) != mine:
                self._find("samples", "", {report.where: math.inf}, "samples: differ inside a replica", 0)
        together = sorted(i for mine in read.values() for i in mine)
        if together != everything or len(read) != layout.dp:
            missing = len(set(everything) - set(together))
            twice = len(together) - len(set(together))
            what = f"samples of the global batch: {missing} are read by no replica, {twice} too often"
            self._find("samples", "", {where: math.inf for where, _ in self.ranks}, what, 0)

    def trace(self) -> None:
        """Outputs in the order of forward, gradients in the order of backward: only the first that differs."""
        for phase in ("forward", "backward"):
            order = self.modules if phase == "forward" else self.modules[::-1]
            for i, module in enumerate(order):
                key = f"{phase}/{module}"
                seen = {where: found.trace[key] for where, found in self.ranks if key in found.trace}
                errors = {where: _relative(d, scale) for where, (d, scale, _) in seen.items()}
                if any(not e <= self.gradient for e in errors.values()):
                    where = max(errors, key=lambda where: errors[where])
                    what = f"{phase}: {_module_text(phase, order, i)}, micro-batch {seen[where][2]}"
                    self._find(phase, module, errors, what, self.gradient)
                    break

    def routing(self) -> None:
        """Each token got the experts that it gets on one device, as many found no room, the losses are the same, and as
        many tokens pass through layers.

        In fp64, where rounding moves no score past another.
        """
        if self.precision != "fp64":
            return
        given = added(pair for _, found in self.ranks for pair in found.choices.items())
        for layer, number in self.fact.choices.items():
            wrong = {where: math.inf for where, _ in self.ranks} if given.get(layer) != number else {}
            what = f"routing: which tokens the experts of layer {layer} got"
            self._find("routing", f"layers.{layer}.mlp.router", wrong, what, 0)
        for attribute, parts in _COUNTED.items():
            expected = getattr(self.fact, attribute)
            for what, part, exact in parts if len(expected) else ():
                seen = expected[:, part]
                errors = {
                    where: _relative(float((getattr(found, attribute)[:, part] - seen).abs().max()),
                                     float(seen.abs().max()))
                    for where, found in self.ranks
                }
                self._find("routing", "", errors, f"routing: {what}", 0 if exact else self.gradient)

    def loss(self) -> None:
        """The loss and the gradient norm that the run reports."""
        for phase, expected in (("loss", self.fact.loss), ("gradient norm", self.fact.gradient_norm)):
            attribute = phase.replace(" ", "_")
            got = {where: getattr(found, attribute) for where, found in self.ranks}
            errors = {where: _relative(abs(value - expected), abs(expected)) for where, value in got.items()}
            self._note(phase, "gradient", errors)
            some = next(iter(got.values()))
            what = f"{phase}: {some:.6g} where one device has {expected:.6g}"
            self._find(phase, "", errors, what, self.gradient)

    def parameters(self) -> None:
        """Gradients in the order in which backward makes them, then updated weights."""
        for kind, references in (
            ("gradient", self.fact.gradients),
            ("weight", self.fact.weights),
            ("in use", self.fact.weights),
        ):
            largest = max(references.values())
            order = sorted(references, key=self._place, reverse=kind == "gradient")
            own = self.adaptive and kind != "gradient"
            allowed = self.tolerance.adaptive * self.amplified if own else self.gradient
            for name in order:
                whole = parameter_of(name)
                if name != whole and self.precision != "fp64":  # where rounding moves tokens to other experts
                    continue
                floor = FLOORS[kind] * largest if name == whole else EXPERT_FLOOR * references[whole]
                key, scale = f"{kind}/{name}", max(references[name], floor)
                errors = {
                    where: _relative(found.differences[key], scale)
                    for where, found in self.ranks
                    if key in found.differences
                }
                if not errors:
                    continue
                column = "gradient" if kind == "gradient" else f"weight {self.rule}"
                self._note(row_of(name), column, errors)
                what = {
                    "gradient": f"{'clipped ' * self.adaptive}gradient of {name}, as summed over the ranks",
                    "weight": f"updated value of {name}",
                    "in use": f"value of {name} that the next forward computes with",
                }[kind]
                self._find(kind, name, errors, what, allowed)

    def _place(self, parameter: str) -> int:
        """Where the execution order has a parameter's module."""
        inside = [i for i, module in enumerate(self.modules) if parameter.startswith(f"{module}.")]
        return min(inside, default=len(self.modules))


def _module_text(phase: str, order: list[str], i: int) -> str:
    if phase == "forward":
        return f"output of {order[i]}"
    if order[i] == "loss":
        return "gradient of the summed loss (its scale)"
    return f"gradient of the output of {order[i]}, as {order[i - 1]} sends it back"


def _relative(difference: float, scale: float) -> float:
    if not math.isfinite(difference):
        return math.inf
    return difference / scale if scale else math.inf * difference if difference else 0.0
