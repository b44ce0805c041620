"""Parallelisms: each transforms a plain model into this rank's share of it."""
