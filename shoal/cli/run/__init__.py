"""The commands that train a model, and those that look at its run, its data and its checkpoints."""
