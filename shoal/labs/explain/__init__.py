"""How one thing works and what it costs, computed from the description that also runs."""
