"""Figure of the orders of context parallelism: the place and step of each score, and the time of each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb

from shoal.engine.parallel.context.token_order import Chunks
from shoal.labs.explain.blocks import hue
from shoal.report.charts import new_figure, styled, to_svg
from shoal.report.svg import mix
from shoal.report.timeline.palette import WHITE, ink

UNSEEN, LONGEST = "#f6f7f9", "#eef0f3"
MOST_NUMBERED = 20  # largest number of tokens whose cells are numbered


@dataclass(frozen=True)
class RingOrder:
    """One order of tokens over the ring.

    Attributes:
        name: name of the order.
        held: the chunks of each place, for a few tokens.
        work: scores that each place computes in each step: [step][place].
    """

    name: str
    held: Sequence[Chunks]
    work: Sequence[Sequence[int]]

    @property
    def slowdown(self) -> float:
        """Time of a ring that waits for its slowest place in each step, over the time of its mean work."""
        return sum(map(max, self.work)) / (sum(map(sum, self.work)) / len(self.work[0]))


@styled
def draw(orders: Sequence[RingOrder], tokens: int) -> str:
    """Draw all orders side by side as SVG."""
    places = len(orders[0].held)
    title = (
        f"Causal attention of {tokens:,} tokens round a ring of {places} places\n"
        "Rows are queries, columns keys: the colour is the place that computes a score, the number the step.\n"
        "Below, the work of each place in each step, and in grey the time of the step."
    )
    figure, charts = new_figure(
        330 * len(orders), 60 + 2 * max(320, 7 * places**2), rows=2, columns=len(orders), title=title
    )
    for order, above, below in zip(orders, charts, charts[len(orders) :], strict=False):
        _draw_scores(above, order)
        _draw_steps(below, order)
    return to_svg(figure)


def _draw_scores(axes: Axes, order: RingOrder) -> None:
    """Draw the square of scores, with the tokens' owners along its upper and left edge."""
    places = len(order.held)
    owner = {token: place for place, chunks in enumerate(order.held) for chunk in chunks for token in chunk}
    n = len(owner)
    cells = np.ones((n + 1, n + 1, 3))
    for query in range(n):
        ground = hue(owner[query] / places)
        cells[query + 1, 0] = cells[0, query + 1] = to_rgb(ground)
        for key in range(query + 1):
            step = (owner[query] - owner[key]) % places
            shade = mix(ground, WHITE, 0.62 * step / places)
            cells[query + 1, key + 1] = to_rgb(shade)
            if n <= MOST_NUMBERED:
                axes.text(key + 1, query + 1, f"{step}", color=ink(shade), size=6.5, ha="center", va="center")
        cells[query + 1, query + 2 :] = to_rgb(UNSEEN)
    axes.imshow(cells)
    axes.set_title(f"{order.name}\n{order.slowdown:.2f} times the mean work")
    axes.set_axis_off()


def _draw_steps(axes: Axes, order: RingOrder) -> None:
    """Draw a bar for each place in each step, over a bar for the step's time."""
    places = len(order.held)
    steps = np.arange(len(order.work))
    axes.barh(steps, [max(work) for work in order.work], height=0.8, color=LONGEST)
    for place in range(places):
        at = steps + 0.8 * ((place + 0.5) / places - 0.5)
        axes.barh(at, [work[place] for work in order.work], height=0.7 / places, color=hue(place / places))
    axes.set_yticks(steps, [f"step {step}" for step in steps])
    axes.invert_yaxis()
    axes.xaxis.set_visible(False)
    axes.grid(False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
