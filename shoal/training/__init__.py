"""Training on one rank: trainer, training engine, records, relaxed data parallelism and resilience.

`shoal.training.trainer` is the loop, `shoal.training.step` one step, and `shoal.training.resilience` saves and restores
states. Uses the packages up to `shoal.planning`; `shoal.launch` starts the processes.
"""
