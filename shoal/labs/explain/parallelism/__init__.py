"""Subjects of `shoal explain` about how a training is split: what is where, in bytes and messages."""
