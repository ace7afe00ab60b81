"""Training: the step, the loop, the optimizer, the metrics."""
