"""Process groups, the mesh, and collectives with the autograd pairs that parallelism is made of."""
