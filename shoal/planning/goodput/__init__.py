"""Goodput of a long training run with failures, checkpoints and spare nodes."""
