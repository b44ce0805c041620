"""Cost model: formulas of time and memory, and the counts that both use."""
