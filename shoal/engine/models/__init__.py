"""Single-device transformers in plain PyTorch, independent of how training is distributed."""
