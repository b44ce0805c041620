"""Shared-memory collectives between the ranks of one host."""
