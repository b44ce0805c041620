"""Basics used by every package: errors, files, tensor boxes, units, the terminal, config sections and options.

It contains nothing about training, and imports neither torch nor other packages of shoal. Bad input raises
`shoal.base.errors.UsageError`, which names the given value, the allowed values and a remedy.
"""
