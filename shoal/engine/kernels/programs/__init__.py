"""Triton programs and their launchers, imported only to launch them: Triton may be absent, and takes a second."""
