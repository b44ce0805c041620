"""Proof by comparison: a layout computes what one device computes, and where it does not, the first place."""
