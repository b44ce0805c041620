"""The real code of one rank of any world, on fake tensors: FLOPs, bytes and memory counted."""
