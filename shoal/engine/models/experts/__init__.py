"""Mixture of experts on one device: routing (`gates`, `router`) and the expert computation (`grouped`)."""
