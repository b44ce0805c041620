"""Kinds of update rules by their names, without torch. `shoal.optim.build` has the rules."""

ELEMENTWISE = ("sgd", "momentum", "adagrad", "adam", "adamw", "radam", "sage")
"""Rules that update every element by itself, from its gradient alone, with states that are numbers of each."""
