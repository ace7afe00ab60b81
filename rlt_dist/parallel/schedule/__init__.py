"""Schedules of pipeline parallelism as data: pure functions, no processes, no tensors.

    graph of one step  ->  order of each stage  ->  schedule  ->  timeline  ->  drawings
    pipeline, looped       pipeline, arrange        wire          simulate      chrome, picture

A graph says what needs what, an order says what each stage does after what, and `wire` turns each
need that crosses stages into one `Send` and one `Receive`. The executor runs a stage's list from
front to back. Its own times make the same timeline that the simulator makes of costs.

What is guaranteed. If a send does not wait for its receiver, no schedule can deadlock, whatever the
costs. Messages from one stage to another are received in the order in which they were sent. If a
send does wait (a rendezvous), a full ring deadlocks: every stage would send before any receives.
"""
