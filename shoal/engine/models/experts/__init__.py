"""Mixtures of experts on one device: who gets which token (`gates`, `router`), and what is done with it (`grouped`)."""
