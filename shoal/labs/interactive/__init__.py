"""Interactive pages: the panels of `shoal lab`, and the engines that answer their moves."""
