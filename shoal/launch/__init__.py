"""Processes of a run: the local launcher, the rank environment, the supervisor, restarts and the worker pool.

Ranks are started here or join those that torchrun or SLURM started; `shoal.launch.watch` finds the one that is lost.
It uses the wings up to `shoal.report`. What a rank then does is `shoal.training`.
"""
