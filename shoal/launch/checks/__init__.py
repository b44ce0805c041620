"""Checks of this machine before ranks start: memory, folders, devices."""
