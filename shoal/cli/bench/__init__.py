"""The commands of `shoal bench`, one file each."""
