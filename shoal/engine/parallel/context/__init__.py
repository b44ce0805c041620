"""Context parallelism: each rank has a part of every sequence, and attention reaches over all parts."""
