"""Measurements: shoal beside torch's own implementations, attention kernels, the matrix-product peak."""
