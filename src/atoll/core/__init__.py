"""Decisions, standard library only. No I/O, clock, thread, tensor or hidden chance lives here."""
