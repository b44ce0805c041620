"""One training step of one rank: the engine, the update, and statistics of routers."""
