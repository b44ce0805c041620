"""Faults injected into real runs, and whether anything was lost."""
