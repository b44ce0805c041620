"""Lose any device at any moment, lose nothing else: see docs/failover.md."""
