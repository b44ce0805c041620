"""Commands that serve a page on this machine."""
