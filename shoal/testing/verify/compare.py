"""The verdict: results of the ranks against one device's, as relative errors, in the order of a step."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from rich.console import Console
from rich.markup import escape

from shoal.engine.models.experts.router import SUMS
from shoal.engine.models.mixture_of_depths import COUNTS
from shoal.spec.layout import Layout
from shoal.spec.number_formats import FORMATS, FP64
from shoal.spec.schedules import ASYNCHRONOUS
from shoal.testing.verify.rank import RankReport
from shoal.testing.verify.reference import StepFacts, strip_expert
from shoal.testing.verify.trace import sum_by_layer, traced_modules


class Tolerance(NamedTuple):
    """Largest relative errors that rounding explains."""

    gradient: float  # of gradients, activations, loss and gradient norm, and of weights after plain SGD
    adaptive: float  # of weights after the run's own optimizer: Adam turns gradients of rounding into full updates


# fp64: five orders above the errors of random layouts (docs/verify.md). The others: generous bounds on rounding in
# small models, not fitted; a fault that they hide shows in fp64.
_TOLERANCES = {
    "float64": Tolerance(gradient=1e-9, adaptive=1e-9),
    "float32": Tolerance(gradient=2e-4, adaptive=1e-2),
    "float16": Tolerance(gradient=5e-2, adaptive=2e-1),
    "bfloat16": Tolerance(gradient=2e-1, adaptive=2e-1),
}
# Rounding in bf16 may move a number to the next float8 code, which differs by an eighth or a quarter.
_FLOAT8 = Tolerance(gradient=5e-1, adaptive=5e-1)
TOLERANCES = {
    name: _TOLERANCES[f.compute.name] if f.products == "compute" or f.compute == FP64 else _FLOAT8
    for name, f in FORMATS.items()
}

PLAIN = "plain-sgd"  # the rule that hides nothing: an update is the gradient. Any other is the run's own

# Adafactor adds only 1e-30 to the row and column means that it divides by (Adam 1e-8): a row of gradients that are
# nearly all rounding is scaled up to the size of others. Sophia-H divides by differences of gradients.
AMPLIFIED = {"adafactor": 1e4, "sophia-h": 1e2}

# The error of a tensor is relative to its largest element, but at least to this fraction of the largest element of all
# parameters: some gradients are zero in exact arithmetic (softmax does not depend on a bias of the keys), and the error
# of a zero has no scale. Weights need the larger floor since biases start at zero.
FLOORS = {"gradient": 1e-4, "weight": 1e-2, "in use": 1e-2}

# For one expert's part of a parameter: at least this fraction of the largest element of all experts. The gradient of an
# expert without tokens is exactly zero; that of one with small gate weights is small.
EXPERT_FLOOR = 1e-6

PHASES = (  # in the order of a step
    "structure", "samples", "forward", "routing", "loss", "backward", "gradient", "gradient norm", "weight", "in use",
)

# Counts of routers, by attribute of `StepFacts`: (description, columns, whether it is a number of tokens).
_COUNTED = {
    "routing": (
        ("tokens dropped", slice(0, 1), True), ("balance and z loss", slice(1, SUMS), False),
        ("tokens of each expert", slice(SUMS, None), True),
    ),
    "depths": (
        ("tokens predicted to pass through layers", slice(0, COUNTS), True),
        ("loss of the predictor", slice(COUNTS, None), False),
    ),
}


@dataclass(frozen=True)
class Mismatch:
    """One difference beyond tolerance."""

    step: int  # -1 if it appears before any step
    rule: str  # name of the optimizer
    phase: str  # one of `PHASES`, or "failure" if a rank raised
    place: str  # module or parameter; "" if it concerns all
    error: float  # relative
    ranks: tuple[str, ...]  # worst first
    text: str  # one line


@dataclass
class Verdict:
    """Result of one verification."""

    # the largest relative error by (row, column); see `find_row`
    table: dict[tuple[str, str], float] = field(default_factory=dict)
    findings: list[Mismatch] = field(default_factory=list)  # differences beyond tolerance, in the order of a step

    @property
    def worst_gradient(self) -> float:
        return max((e for (row, column), e in self.table.items() if column == "gradient"), default=0.0)

    def print(self, console: Console, precision: str, reference: str, seconds: float) -> None:
        """Print that everything agrees with the reference, or the first difference and the number of all."""
        allowed = TOLERANCES[precision].gradient
        if not self.findings:
            console.print(
                f"[bold green]the same[/]  as {reference}: every gradient to {self.worst_gradient:.1e} "
                f"(allowed {allowed:.0e}), {seconds:.1f} s"
            )
            return
        first = self.findings[0]
        console.print(f"[bold red]differs[/]   first at {escape(first.text)}")
        if len(first.ranks) > 1:
            more = " ..." if len(first.ranks) > 8 else ""
            console.print(f"          ranks: {escape('; '.join(first.ranks[:8]))}{more}")
        places = {(f.rule, f.step, f.phase, f.place) for f in self.findings}
        console.print(f"          {len(places)} differences beyond {allowed:.0e} in all, {seconds:.1f} s")


def describe_reference(layout: Layout, usual: str = "one device") -> str:
    """Return what the ranks of a layout are compared with: ``usual``, unless its pipeline is asynchronous."""
    return "one device with the same stale weights" if layout.schedule in ASYNCHRONOUS else usual


def find_row(parameter: str) -> str:
    """Return the row of a parameter in the table: its kind of module.

    >>> find_row("layers.12.attention.q.weight"), find_row("layers.0.mlp_norm.weight"), find_row("embed.token.weight")
    ('attention q', 'norms', 'embed token')
    """
    if "norm" in parameter:
        return "norms"
    return re.sub(r"^layers\.\d+\.|\.(weight|bias)$", "", strip_expert(parameter)).replace(".", " ")


def judge(
    layout: Layout,
    layers: int,
    precision: str,
    facts: dict[str, list[StepFacts]],
    reports: list[RankReport],
) -> Verdict:
    """Compare the results of all ranks with one device's, by rule for each step."""
    verdict = Verdict()
    parameters = [name for name in next(iter(facts.values()))[0].gradients if name == strip_expert(name)]
    verdict.findings += _check_coverage(parameters, reports)
    for rule, steps in facts.items():
        for step, fact in enumerate(steps):
            comparison = _StepComparison(rule, step, precision, fact, layers, reports, verdict)
            comparison.check_samples(layout)
            comparison.check_trace()
            comparison.check_routing()
            comparison.check_loss()
            comparison.check_parameters()
    order = {rule: i for i, rule in enumerate(facts)}
    verdict.findings.sort(key=lambda f: (order.get(f.rule, -1), f.step, PHASES.index(f.phase)))
    return verdict


def _check_coverage(parameters: list[str], reports: list[RankReport]) -> list[Mismatch]:
    """Check that every element of every parameter has exactly one primary owner."""
    held = [piece for report in reports for piece in report.held]
    shapes = {name: global_shape for name, global_shape, _, _ in held}
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
        found.append(Mismatch(-1, "", "structure", parameter, math.inf, (), text))
    return found


class _StepComparison:
    """Comparison of one step of one rule, which adds its findings to the verdict."""

    def __init__(
        self, rule: str, step: int, precision: str, fact: StepFacts, layers: int, reports: list[RankReport],
        verdict: Verdict,
    ):
        self.rule, self.step, self.fact, self.verdict = rule, step, fact, verdict
        self.precision, self.tolerance = precision, TOLERANCES[precision]
        self.adaptive = rule != PLAIN
        # From the second step on, the weights contain amplified rounding.
        self.amplified = AMPLIFIED.get(rule, 1.0)
        self.gradient = self.tolerance.gradient * (self.amplified if step else 1.0)
        self.modules = traced_modules(layers)
        self.reports = reports
        self.ranks = [(report.where, report.steps[rule, step]) for report in reports]

    def _find(self, phase: str, place: str, errors: dict[str, float], what: str, allowed: float) -> None:
        """Add a finding if an error exceeds the allowed one; ``errors`` is by rank."""
        beyond = (where for where, error in errors.items() if not error <= allowed)
        wrong = sorted(beyond, key=lambda where: errors[where], reverse=True)
        if wrong:
            error = errors[wrong[0]]
            others = f" and {len(wrong) - 1} more of {len(self.ranks)} ranks" if len(wrong) > 1 else ""
            text = f"step {self.step} with {self.rule}, {what}, on {wrong[0]}{others}: relative error {error:.1e}"
            self.verdict.findings.append(Mismatch(self.step, self.rule, phase, place, error, tuple(wrong), text))

    def _note(self, row: str, column: str, errors: dict[str, float]) -> None:
        """Keep the largest error, except of gradients of weights that contain amplified rounding."""
        if column != "gradient" or self.gradient == self.tolerance.gradient:
            table = self.verdict.table
            table[row, column] = max(*errors.values(), table.get((row, column), 0.0))

    def check_samples(self, layout: Layout) -> None:
        """Check that exactly one replica, with all of its ranks, reads each sample of the global batch."""
        everything = list(range(len(self.fact.tokens)))
        read: dict[int, list[int]] = {}
        for report in self.reports:
            mine = sorted(i for batch in report.steps[self.rule, self.step].samples for i in batch)
            if read.setdefault(report.replica, mine) != mine:
                self._find("samples", "", {report.where: math.inf}, "samples: differ within a replica", 0)
        together = sorted(i for mine in read.values() for i in mine)
        if together != everything or len(read) != layout.dp:
            missing = len(set(everything) - set(together))
            twice = len(together) - len(set(together))
            what = f"samples of the global batch: {missing} are read by no replica, {twice} repeatedly"
            self._find("samples", "", {where: math.inf for where, _ in self.ranks}, what, 0)

    def check_trace(self) -> None:
        """Find the first output that differs, in the order of forward, and the first gradient, of backward."""
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

    def check_routing(self) -> None:
        """Check each token's experts, the counts of dropped and passing tokens, and the routers' losses.

        Only in fp64, where rounding does not change the order of scores.
        """
        if self.precision != "fp64":
            return
        given = sum_by_layer(pair for _, found in self.ranks for pair in found.choices.items())
        for layer, number in self.fact.choices.items():
            wrong = {where: math.inf for where, _ in self.ranks} if given.get(layer) != number else {}
            what = f"routing: the tokens of the experts of layer {layer}"
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

    def check_loss(self) -> None:
        for phase, expected in (("loss", self.fact.loss), ("gradient norm", self.fact.gradient_norm)):
            attribute = phase.replace(" ", "_")
            got = {where: getattr(found, attribute) for where, found in self.ranks}
            errors = {where: _relative(abs(value - expected), abs(expected)) for where, value in got.items()}
            self._note(phase, "gradient", errors)
            what = f"{phase}: {next(iter(got.values())):.6g} where one device has {expected:.6g}"
            self._find(phase, "", errors, what, self.gradient)

    def check_parameters(self) -> None:
        """Check gradients in the order of backward, then updated weights."""
        weights = self.fact.weights
        for kind, references in (("gradient", self.fact.gradients), ("weight", weights), ("in use", weights)):
            largest = max(references.values())
            order = sorted(references, key=self._place, reverse=kind == "gradient")
            own = self.adaptive and kind != "gradient"
            allowed = self.tolerance.adaptive * self.amplified if own else self.gradient
            for name in order:
                parameter = strip_expert(name)
                if name != parameter and self.precision != "fp64":  # rounding moves tokens to other experts
                    continue
                floor = FLOORS[kind] * largest if name == parameter else EXPERT_FLOOR * references[parameter]
                key, scale = f"{kind}/{name}", max(references[name], floor)
                errors = {
                    where: _relative(found.differences[key], scale)
                    for where, found in self.ranks
                    if key in found.differences
                }
                if not errors:
                    continue
                column = "gradient" if kind == "gradient" else f"weight {self.rule}"
                self._note(find_row(name), column, errors)
                what = {
                    "gradient": f"{'clipped ' * self.adaptive}gradient of {name}, summed over the ranks",
                    "weight": f"updated value of {name}",
                    "in use": f"value of {name} in the next forward",
                }[kind]
                self._find(kind, name, errors, what, allowed)

    def _place(self, parameter: str) -> int:
        """Return the position of a parameter's module in the order of execution."""
        inside = [i for i, module in enumerate(self.modules) if parameter.startswith(f"{module}.")]
        return min(inside, default=len(self.modules))


def _module_text(phase: str, order: list[str], i: int) -> str:
    if phase == "forward":
        return f"output of {order[i]}"
    if order[i] == "loss":
        return "gradient of the summed loss (its scale)"
    return f"gradient of the output of {order[i]}, from {order[i - 1]}"


def _relative(difference: float, scale: float) -> float:
    if not math.isfinite(difference):
        return math.inf
    return difference / scale if scale else math.inf * difference if difference else 0.0
