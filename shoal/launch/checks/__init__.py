"""What must hold of this machine before ranks start: memory, folders, devices."""
