"""Reports of runs, estimates and plans: timelines, figures, pages, traces and tables.

Everything is drawn from plain data, without torch. It uses the wings above it; of `shoal.training` it only reads
records. Each page is one file and opens offline.
"""
