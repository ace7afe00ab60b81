"""Experiments that a command runs: what the models can do, shown by training them."""
