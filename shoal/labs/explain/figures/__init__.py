"""The figures (SVG) of what is explained."""
