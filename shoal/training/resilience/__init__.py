"""Fault tolerance: checkpoints in host memory, heartbeats, silent-failure checks. See docs/failover.md."""
