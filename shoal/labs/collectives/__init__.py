"""Collectives as algorithms: one description of each (the messages of each round), many readers.

`textbook.describe` gives a description by name, `checker.check` proves it, `run.run_vector` and `run.run_blocks`
execute it over point-to-point transfers, `shoal.labs.collectives.price` prices it, and `shoal explain` draws it.
"""
