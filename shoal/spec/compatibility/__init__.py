"""What goes with what: features of a run, the pairs that exclude each other, and sizes that must fit."""
