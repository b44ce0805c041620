"""Detection of lost ranks and their causes: heartbeat checks, stack traces, exit records."""
