"""Transformer-XL: layers, adaptive input and output, and the model that composes them."""
