"""Training steps of shoal beside those of torch, on the same work."""
