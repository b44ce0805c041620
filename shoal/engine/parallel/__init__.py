"""Each parallelism in a room of its own: it takes a plain model and transforms it."""
