"""Sharded arrays in the field's named-axis notation: what is written, what may be done to it, real ranks that do it."""
