"""A plan per model: which weight is cut how, which piece sits on which stage, what is shared.

`cut` says how one tensor is cut over the tensor axis; `rlt`, `transformer_xl` and `whole` say it
for every name, and which pieces a stage keeps; `layout` puts both together for one process.
"""
