"""Submission of a run to a cluster: batch scripts and manifests from templates, and a launcher that runs on Ray.

A template is the file as it is submitted, with ``{{name}}`` for what depends on the run. Uses `shoal.spec` and the
checks of `shoal.training`.
"""
