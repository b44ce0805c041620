"""Tables and pages of estimates and plans."""
