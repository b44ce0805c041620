"""Search for the split of every operator of a module over a cluster, and for its pipeline stages."""
