"""The search for the fastest layout: its space, bounds, and branch and bound."""
