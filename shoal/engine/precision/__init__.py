"""Which number format holds what: `formats` the facts, `policy` torch's dtypes, `memory` bytes per parameter."""
