"""Models as lists of pieces that know nothing of ranks, devices or files."""
