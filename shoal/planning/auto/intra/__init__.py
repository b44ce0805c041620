"""Operators on one mesh: the ways to split each, their prices, and the integer program that chooses."""
