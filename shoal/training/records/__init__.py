"""Records of a run: metrics, terminal output, histograms, profiles."""
