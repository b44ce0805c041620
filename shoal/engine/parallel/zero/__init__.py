"""Data parallelism and ZeRO: buckets, gradients, sharded parameters, and when they are gathered and reduced."""
