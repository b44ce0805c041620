"""The command line: short files that parse options, call the public API and print the result.

Commands are imported on use, so that bad input is rejected before torch is loaded. A file has at most 150 lines;
anything besides parsing and printing belongs to another package.
"""
