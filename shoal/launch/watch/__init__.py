"""Which rank is lost, and why: heartbeats watched, stacks read, ends explained."""
