"""The command line: one thin file for each command, which parses options, calls the public API and prints the result.

Commands are imported on use, so that bad input is refused before torch is loaded. A file has at most 150 lines; what
is more than parsing and printing belongs to another wing.
"""
