"""Data parallelism with ZeRO: flat buckets, sharded parameters, gradient reduction and prefetching."""
