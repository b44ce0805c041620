"""A step played before it is run: what a `Program` costs in time, idleness and memory."""

from shoal.pipeline.simulator.disturbance import Disturbance
from shoal.pipeline.simulator.engine import simulate
from shoal.pipeline.simulator.timeline import Timeline
from shoal.pipeline.simulator.times import ActionTimes, MessageTimes

__all__ = ["ActionTimes", "Disturbance", "MessageTimes", "Timeline", "simulate"]
