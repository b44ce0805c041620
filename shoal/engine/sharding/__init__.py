"""Plans that split a module operator by operator over ranks, as data, and their execution."""
