"""Data parallelism that does not sum every gradient exactly and at once (docs/relaxed.md)."""
