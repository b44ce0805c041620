"""Precisions: torch dtypes, 8-bit codes, loss scaling, stochastic rounding and histograms."""
