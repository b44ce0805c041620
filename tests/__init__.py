"""Tests of shoal."""

import os
import sys

# The suite starts hundreds of interpreters: what one has compiled the others read, also where the environment asks for
# no bytecode files.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
