"""First contact with a GPU: six parts of correctness and speed, each a list of items in processes of their own."""
