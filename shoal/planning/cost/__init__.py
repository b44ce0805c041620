"""The cost model: one of time, one of memory, and the counts that both take."""
