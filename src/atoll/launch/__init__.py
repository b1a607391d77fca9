"""Starting a whole run on one machine."""
