"""Figures of a run, folded from its tape."""
