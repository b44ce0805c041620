"""Checks, before anything is created, that a run fits on this machine."""
