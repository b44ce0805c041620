"""Pipeline programs: the ordered actions of each rank for one training step.

Schedules build programs, the checker proves them complete and free of deadlock, and the simulator times them. The
package uses `shoal.base` and `shoal.spec` but not torch; the engine executes the same programs.
"""
