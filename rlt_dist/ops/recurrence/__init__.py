"""The recurrence core: decoder layers and their feedback over a segment, forward and backward.

One problem (`problem.py`), four backends (`dispatch.py`): `reference` is plain autograd and defines
the result; `python`, `native` and `triton` are one autograd Function (`function.py`) around a loop
in torch (`loop.py`, `steps.py`, `feedback.py`), compiled for the CPU (`native/`), or in Triton's
kernels on CUDA (`triton_loop.py`), recorded as graphs (`graphs.py`). All loops fill the same tape
(`tape.py`), over some of the chunks at a time, so that a stage of a pipeline can stop where it
needs another (`stage.py`); all but `native` run with weights that are cut over processes as well.

Letters: T tokens of a segment, B lanes, K chunks, C tokens of a chunk, d width, H query heads and
KV key/value heads of width w, W window, M memory entries, f inner width of the feed-forward.
Everything is time-major, so that a token's lanes lie side by side.
"""
