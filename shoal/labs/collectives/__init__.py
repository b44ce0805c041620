"""Collective algorithms as data: described in `textbook`, proved in `checker`, executed in `run`, priced in `price`."""
