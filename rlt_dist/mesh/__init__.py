"""Ranks, process groups, collectives: passed as arguments, never read from globals."""
