"""What every wing needs: errors, files, boxes of tensors, units, the terminal, config sections, options.

It knows nothing of training and imports neither torch nor any other wing. Bad input is a `shoal.base.errors.UsageError`
that says what was given, what is allowed and how to mend it.
"""
