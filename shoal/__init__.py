"""shoal: train one transformer language model on many devices, moving as one."""
