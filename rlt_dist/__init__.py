"""Distributed pretraining of models whose state outlives a batch."""

__version__ = "0.1.0"
