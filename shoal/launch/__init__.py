"""Processes of a run: local launcher, rank environment, supervisor, restarts and worker pool.

Ranks are started here or by torchrun or SLURM; `shoal.launch.watch` finds lost ranks. Uses the packages up to
`shoal.report`; `shoal.training` is what each rank runs.
"""
