"""Commands that train a model, commands that inspect its run, data and checkpoints, and the lab."""
