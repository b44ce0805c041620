"""Compatibility of features and sizes: pairs of features that exclude each other, and sizes that must fit."""
