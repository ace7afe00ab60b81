"""Lanes: which documents each reads, in which order, and batches of them."""
