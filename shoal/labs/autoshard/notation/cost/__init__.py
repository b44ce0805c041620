"""What products of sharded arrays cost: collectives on a mesh, the search for routes, when which parallelism waits."""
