"""Predictions before a run: time, memory, goodput, and the search for the fastest layout.

`shoal.planning.cost` has the formulas; `shoal.planning.search` prices layouts with them. The package depends on
packages up to `shoal.engine`, and imports torch only inside functions that need it: an estimate does not import torch.
"""
