"""Commands that train a model, and commands that inspect its run, data and checkpoints."""
