"""What `shoal calibrate` measures of a machine, and how well an estimate with it predicts real steps."""
