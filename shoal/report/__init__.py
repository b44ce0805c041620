"""Pictures and tables of what happened or would happen: timelines, figures, pages, traces, tables of plans.

Everything is drawn from plain data, so it needs no torch. It uses the wings up to `shoal.training`, of which it reads
records alone. Pages are one file each and open offline.
"""
