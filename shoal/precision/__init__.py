"""Which number format holds what."""

from shoal.precision.policy import POLICIES, Policy

__all__ = ["POLICIES", "Policy"]
