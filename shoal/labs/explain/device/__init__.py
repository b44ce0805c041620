"""Subjects of `shoal explain` about one device and about a budget of devices: hardware, rooflines, arithmetic."""
