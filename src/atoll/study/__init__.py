"""How good is a setting? The real core and the real tensors on a virtual clock, in one process."""
