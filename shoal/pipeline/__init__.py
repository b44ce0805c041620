"""One step as data: which rank does what, in which order."""
