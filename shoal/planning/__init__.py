"""What a run costs before it runs: time, memory, goodput, and the search for the fastest layout.

`shoal.planning.cost` has the formulas, `shoal.planning.search` prices layouts with them. It uses the wings up to
`shoal.engine`, of which it imports torch only where a function needs it: an estimate takes no torch.
"""
