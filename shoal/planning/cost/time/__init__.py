"""Seconds that a stage takes: products, collectives, gathers and updates."""
