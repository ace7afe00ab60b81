"""Tasks with an exact answer after each token, drawn from a seed: pure functions of numbers."""
