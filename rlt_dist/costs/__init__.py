"""What a configuration costs: FLOPs, bytes held and sent, as functions of sizes; nothing is built.

`looped.py`, `stack.py` and `recurrent.py` say of each kind of work what one rank multiplies and
what it sums over its tensor group; everything else adds that up.
"""
