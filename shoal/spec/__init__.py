"""What a run is, as data: its config, its layout, the catalog of facts, number formats and what goes with what.

Everything here is frozen and checked before any process starts. It uses `shoal.base` alone, and no torch.
`shoal.spec.compatibility` is the one table of features that exclude each other.
"""
