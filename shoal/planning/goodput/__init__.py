"""The share of a long training that counts, with failures, checkpoints and spares."""
