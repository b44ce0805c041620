"""How one training step is split over ranks: the `Layout`, its derived sizes and its rules."""

from shoal.spec.layout.layout import (
    AXES,
    EXPERT_AXES,
    FILE,
    ContextOrder,
    Layout,
    Recompute,
    ScheduleName,
    Sync,
    ZeroStage,
    mesh_axes,
)

__all__ = [
    "AXES",
    "EXPERT_AXES",
    "FILE",
    "ContextOrder",
    "Layout",
    "Recompute",
    "ScheduleName",
    "Sync",
    "ZeroStage",
    "mesh_axes",
]
