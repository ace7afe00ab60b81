"""Benchmarks: variants of one computation side by side, in time, in memory, and against a floor.

`compare.py` runs a benchmark; `recurrence.py`, `transformer_xl.py` and `evaluation.py` say what the
shapes and variants of each are. A floor (`products.py`, `floor.py`) is the matrix products of a
shape alone. A figure is worth something only beside the others of its run, on a quiet machine.
"""
