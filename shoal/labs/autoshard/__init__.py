"""Sharding found by itself, on the graph of any module (Zheng et al. 2022, "Alpa"): operators over a mesh by an integer
program, stages over sub-meshes by dynamic programming."""
