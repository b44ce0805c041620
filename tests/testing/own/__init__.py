"""Tests of models of one's own."""
