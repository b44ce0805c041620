"""Timelines of simulated or measured steps: in a terminal, as a figure, or as a trace."""
