"""Closed forms of schedule costs from the papers, for equal stages and instant messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class EqualStages:
    """Parameters of the closed forms."""

    # p, m, v: pipeline ranks, micro-batches, stages on each rank
    p: int
    m: int
    v: int = 1
    # f, b, w: time of a forward, of the input half and of the weight half of a backward, for one stage
    f: float = 1.0
    b: float = 1.0
    w: float = 1.0
    pair: float | None = None  # time of a forward and a full backward computed together; None for sequential

    @property
    def backward(self) -> float:
        """Time of a full backward."""
        return self.b + self.w

    @property
    def work(self) -> float:
        return self.m * self.v * (self.f + self.backward)


@dataclass(frozen=True)
class Theory:
    """Closed forms of one schedule."""

    source: str  # the paper, and where in it
    idle: Callable[[EqualStages], float]  # maximum idle time of a rank
    alive: Callable[[EqualStages], int]  # maximum number of activations on a rank, as counted by `Timeline.peak_live`
    # ranks synchronise at the step's end. If False, only idle time between a rank's first and last computation counts.
    flushed: bool = True
    needs: str = ""  # condition of the forms, in words; "" if unconditional
    holds: Callable[[EqualStages], bool] = lambda step: True  # the same condition as a predicate


def _flush(s: EqualStages) -> float:
    """Return the time to fill and drain a pipeline with full backwards."""
    return (s.p - 1) * (s.f + s.backward)


def _full_rounds(s: EqualStages) -> bool:
    return s.v == 1 or s.m % s.p == 0


def _fits(s: EqualStages) -> bool:
    """Return whether the weight halves fit into the gaps."""
    return s.w <= s.f <= s.b and s.m >= 2 * s.p


FITS = "T_W <= T_F <= T_B, m >= 2p"


def _both_ways(source: str, half: Callable[[EqualStages], float]) -> Theory:
    """Return the DualPipe form (PP/2 - 1)(F&B + B - 3W); B is the full backward, half = PP/2 ranks from end to middle.
    """
    return Theory(
        source,
        idle=lambda s: (half(s) - 1) * ((s.pair or 0.0) + s.backward - 3 * s.w),
        alive=lambda s: int(2 * half(s)) + 1,
        needs="pairs computed together, F&B >= B, T_W <= T_F <= T_B, m even and >= 4p",
        holds=lambda s: (s.pair or 0) >= s.backward and s.w <= s.f <= s.b and s.m % 2 == 0 and s.m >= 4 * s.p,
    )


THEORY = {
    "naive": Theory("one micro-batch in flight, all others wait", lambda s: (s.p - 1) * s.work, lambda s: 1),
    "gpipe": Theory("Huang et al. 2019, section 2.3: (p-1)/(m+p-1) of the step", _flush, lambda s: s.m),
    "1f1b": Theory("Narayanan et al. 2021, section 2.2.1: (p-1)/m of the ideal time", _flush, lambda s: min(s.p, s.m)),
    "looped-bfs": Theory(
        "Lamy-Poirier 2023, section 3: (p-1)/(v m) of the ideal time",
        _flush,
        lambda s: s.m * s.v,
        needs="v = 1, or m a multiple of p",
        holds=_full_rounds,
    ),
    "interleaved-1f1b": Theory(
        "Narayanan et al. 2021, section 2.2.2: (p-1)/(v m) of the ideal time; "
        "Korthikanti et al. 2022, section 4.2.3: 1 + (p-1)/(p v) times the memory of 1F1B",
        _flush,
        lambda s: min(s.m * s.v, s.p if s.v == 1 else s.p * s.v + s.p - 1),
        needs="v = 1, or m a multiple of p",
        holds=_full_rounds,
    ),
    "zb-h1": Theory(
        "Qi et al. 2024, table 2: (p-1)(T_F + T_B - T_W)",
        lambda s: (s.p - 1) * (s.f + s.b - s.w),
        lambda s: s.p,
        needs=FITS,
        holds=_fits,
    ),
    "zb-h2": Theory(
        "Qi et al. 2024, table 2: (p-1)(T_F + T_B - 2 T_W)",
        lambda s: (s.p - 1) * (s.f + s.b - 2 * s.w),
        lambda s: 2 * s.p - 1,
        flushed=False,
        needs=FITS,
        holds=_fits,
    ),
    "interleaved-zb": Theory(
        "Qi et al. 2024, table 2, for each of Narayanan et al.'s stages",
        lambda s: (s.p - 1) * (s.f + s.b - s.w),
        lambda s: s.p * s.v,
        needs=f"{FITS}, and a multiple of p where v > 1",
        holds=lambda s: _fits(s) and _full_rounds(s),
    ),
    "zb-v": Theory(
        "Qi et al. 2024, section 6: no bubble",
        lambda s: 0.0,
        lambda s: 2 * s.p,
        flushed=False,
        needs="T_F = T_B = T_W, m >= 2p",
        holds=lambda s: s.f == s.b == s.w and s.m >= 2 * s.p,
    ),
    "dualpipe": _both_ways("DeepSeek-AI 2024, table 2: (PP/2-1)(F&B + B - 3W)", lambda s: s.p / 2),
    "dualpipev": _both_ways("DualPipe's, on half as many ranks", lambda s: s.p),
}
