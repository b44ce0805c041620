"""Branch-and-bound search for the fastest layout, with its space and bounds."""
