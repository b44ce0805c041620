"""From a module to a graph of operators: export, backward, and the layers that repeat."""
