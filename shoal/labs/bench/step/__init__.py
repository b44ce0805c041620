"""Training steps of shoal beside torch's, on the same work."""
