"""Recovery from lost ranks and devices: generations of a process, layouts for fewer devices."""
