"""Reports of runs, estimates and plans: timelines, figures, pages, traces and tables.

Everything is drawn from plain data, without torch. Of `shoal.training` the package only reads records. Each page is one
file and opens offline.
"""
