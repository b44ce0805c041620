"""What is shown of one run: how it went, measured and simulated; what its data and its checkpoints hold."""
