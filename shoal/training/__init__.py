"""Training steps of one rank: the trainer, the engine of a step, records, relaxed data parallelism and resilience.

`shoal.training.trainer` is the loop, `shoal.training.step` what one step does, `shoal.training.resilience` what is kept
for the case of a failure. It uses the wings up to `shoal.planning`; processes are started by `shoal.launch`.
"""
