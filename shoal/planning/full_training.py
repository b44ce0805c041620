"""A complete training: from a step's time and one of tokens, days or dollars the others, with energy and power."""

from __future__ import annotations

from typing import NamedTuple

from pydantic import PositiveFloat

from shoal.base.errors import UsageError
from shoal.base.units import DAY, HOUR
from shoal.planning.cost.flops import dollars
from shoal.planning.run import EstimatedRun


class FullTraining(NamedTuple):
    """A complete training on some devices.

    Attributes:
        price: dollars per device and hour; None if unknown.
        watts: power of one device with its share of its node, see `Cluster.watts`; None if unknown.
        pue: power of the building relative to its computers.
    """

    tokens: float
    seconds: float
    devices: int
    price: float | None
    watts: float | None
    pue: float

    @property
    def days(self) -> float:
        return self.seconds / DAY

    @property
    def dollars(self) -> float | None:
        """Rent of the devices."""
        return dollars(self.seconds, self.devices, self.price) if self.price else None

    @property
    def kilowatts(self) -> float | None:
        """Power of all devices with their nodes and their building, at the limit that `watts` states."""
        return self.devices * self.watts / 1000 * self.pue if self.watts else None

    @property
    def kilowatt_hours(self) -> float | None:
        """Energy at this power."""
        return self.seconds / HOUR * self.devices * self.watts / 1000 * self.pue if self.watts else None


def train_fully(
    run: EstimatedRun, step_seconds: PositiveFloat, *, tokens: PositiveFloat | None = None,
    days: PositiveFloat | None = None, budget: PositiveFloat | None = None, price: PositiveFloat | None = None,
) -> FullTraining:  # fmt: skip
    """Return a complete training, of which at most one of ``tokens``, ``days`` and ``budget`` is given.

    Args:
        tokens: tokens of the training (default: 20 per parameter, unless another is given).
        days: its duration.
        budget: its rent in dollars.
        price: dollars per device and hour (default: the catalog's list price).

    Raises:
        UsageError: more than one is given, or a budget without a known price.

    >>> from shoal import Layout, estimate
    >>> step = estimate(Layout(tp=8, pp=4, zero=1), model="llama-3-70b", cluster="64x8xH100")
    >>> month = train_fully(step.run, step.step_seconds, days=30)
    >>> round(month.kilowatts), round(train_fully(step.run, step.step_seconds, tokens=month.tokens).days)
    (718, 30)
    """
    if sum(given is not None for given in (tokens, days, budget)) > 1:
        raise UsageError("--tokens, --days and --budget of one number of devices: one determines the others."
                         "\n  Give one.")  # fmt: skip
    cluster = run.cluster
    price = find_price(run, price, needed=budget is not None)
    if budget is not None and price:
        days = budget / (cluster.size * price) * HOUR / DAY
    if days is not None:
        tokens = days * DAY / step_seconds * run.tokens
    tokens = tokens or 20 * run.shape.parameters()
    return FullTraining(tokens, tokens / run.tokens * step_seconds, cluster.size, price, cluster.watts, cluster.pue)


def find_price(run: EstimatedRun, price: float | None, *, needed: bool) -> float | None:
    """Return the price given, else the catalog's, in dollars per device and hour.

    Raises:
        UsageError: a price is needed and the catalog has none.
    """
    machine = run.cluster.accelerator
    price = price or machine.dollars_per_hour
    if needed and not price:
        raise UsageError(f"--budget: {machine.name} has no price in the catalog.\n  Give --price.")
    return price
