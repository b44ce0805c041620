"""What a run measures and shows: metrics, display, histograms, profiles."""
