"""Benchmarks that train: what a technique costs in loss."""
