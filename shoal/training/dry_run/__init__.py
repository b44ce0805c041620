"""Dry runs: execute one rank of any world on fake tensors to count FLOPs, bytes and memory."""
