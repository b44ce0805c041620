"""One training step of one rank: the engine, the optimizer update and router statistics."""
