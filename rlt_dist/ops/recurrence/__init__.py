"""The recurrence core: decoder layers and their feedback over a segment, forward and backward.

One problem (`problem.py`), three backends (`dispatch.py`): `reference` is plain autograd and
defines the result; `python` and `native` are one autograd Function (`function.py`) around a loop
in torch (`steps.py`, `feedback.py`) or compiled for the CPU (`native/`).

Letters: T tokens of a segment, B lanes, K chunks, C tokens of a chunk, d width, H query heads and
KV key/value heads of width w, W window, M memory entries, f inner width of the feed-forward.
Everything is time-major, so that a token's lanes lie side by side.
"""
