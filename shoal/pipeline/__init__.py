"""The program of one training step: for each rank, its ordered actions.

Schedules make programs, the checker proves them complete and free of deadlock, and the simulator plays them. It uses
`shoal.base` and `shoal.spec`, and no torch: the engine executes the same programs.
"""
