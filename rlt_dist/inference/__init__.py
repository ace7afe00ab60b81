"""Using a model: evaluate, generate, verify; all through the models' one composing function."""
