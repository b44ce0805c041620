"""Simulation of a `Program` before it runs: its time, idle time and memory."""

from shoal.pipeline.simulator.engine import Disturbance, simulate
from shoal.pipeline.simulator.timeline import Timeline
from shoal.pipeline.simulator.times import ActionTimes, MessageTimes

__all__ = ["ActionTimes", "Disturbance", "MessageTimes", "Timeline", "simulate"]
