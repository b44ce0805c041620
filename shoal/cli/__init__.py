"""The command line: one short file per command, which parses options, calls the public API and prints the result.

Commands are imported on use, so that bad input is rejected before torch is loaded. A file has at most 150 lines;
anything besides parsing and printing belongs to another package.
"""
