"""Timelines of steps, simulated or measured: in a terminal, as a figure, as a trace."""
