"""Time of a stage in seconds: matrix products, collectives, gathers and updates."""
