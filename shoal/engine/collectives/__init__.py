"""Process groups, device mesh, collectives and their autograd pairs."""
