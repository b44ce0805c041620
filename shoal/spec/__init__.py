"""Description of a run as data: config, layout, catalog of facts, number formats and feature compatibility.

Everything here is frozen and checked before any process starts. It imports `shoal.base` only, and no torch.
`shoal.spec.compatibility` is the one table of features that exclude each other.
"""
