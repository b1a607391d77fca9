"""Drivers of the core on the real network: the syncer server and the learner's agent process."""
