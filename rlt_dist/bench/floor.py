"""The floor of a recurrence step: its matrix products alone, with the kernels that native uses.

Counted are, forward and backward:

- token by token, with the compiled loop's own kernels (`floor.cpp` includes them), on as many rows
  as the loop has and the lanes split over threads as it splits them: every projection of the
  decoder and of the feedback, and each query's products with the window and with the memory
  entries within its reach;
- batched, as torch's products (`products.py`): the decoder's weight gradients and the memory's, the
  encoder with its attention, memory projections, the encoder's half of the gate, and the head.

Not counted: norms, rotary, softmax, SwiGLU, the loss, packing of weights, keeping what backward
needs, and allocation.
"""

from ctypes import Structure, addressof, byref, c_int32, c_int64, c_void_p
from pathlib import Path

import torch

from rlt_dist.bench.products import Product, Products, attention, linear, towards_weight
from rlt_dist.config.model import RltConfig
from rlt_dist.ops.recurrence.native.build import library

_PANEL = 64
"""Columns of a packed float32 weight are a multiple of this (kernels.h)."""


class _Weight(Structure):
    _fields_ = (("data", c_void_p), ("inputs", c_int32), ("outputs", c_int32))


class _Loop(Structure):
    _sizes = ("tokens", "lanes", "layers", "heads", "kv_heads", "width", "window", "past", "reach")
    _fields_ = (
        *((name, c_int32) for name in (*_sizes, "matrices")),
        *((name, c_void_p) for name in ("weights", "keys", "values", "entries", "dentries")),
    )


def layer_sizes(config: RltConfig) -> list[tuple[int, int]]:
    """(inputs, outputs) of a decoder layer's six projections, in the order of `LayerWeights`."""
    d, queries = config.d_model, config.heads * config.head_width
    keys = config.key_value_heads * config.head_width
    attentions = [(d, queries + 2 * keys), (queries, d), (d, queries), (queries, d)]
    return [*attentions, (d, 2 * config.ffn), (config.ffn, d)]


def batched_products(config: RltConfig, vocabulary: int, lanes: int, tokens: int) -> list[Product]:
    """The products of a step, forward and backward, that stand outside the loop.

    The memory is full: `memory_len` entries in front of the segment's own.
    """
    rows, d, entries = lanes * tokens, config.d_model, _past(config) + tokens
    queries, width = config.heads * config.head_width, config.head_width
    keys = config.key_value_heads * width
    encoder = [
        *linear(rows, d, queries),
        *2 * linear(rows, d, keys),
        *attention(lanes * config.heads, tokens, entries, width),
        *linear(rows, queries, d),
        *2 * linear(rows, d, config.ffn),
        *linear(rows, config.ffn, d),
    ]
    of_weights = [towards_weight(rows, *sizes) for sizes in layer_sizes(config)]
    grouped = config.heads // config.key_value_heads * tokens
    of_memory = 2 * [towards_weight(grouped, width, entries, lanes * config.key_value_heads)]
    return [
        *config.encoder_layers * encoder,
        *2 * config.memory_groups * linear(rows, d, keys),
        *linear(rows, d, d),
        *config.decoder_layers * (of_weights + of_memory),
        towards_weight(rows, d, 2 * d),
        *linear(rows, d, vocabulary),
    ]


class LoopProducts:
    """A step that runs the loop's own products, forward and backward, of an RLT-1 decoder."""

    def __init__(self, config: RltConfig, lanes: int, tokens: int) -> None:
        """Raises UserError where nothing can be compiled."""
        self._run = library(Path(__file__).with_name("floor.cpp")).loop_products
        self._run.restype = c_int64
        kv, width, past = config.key_value_heads, config.head_width, _past(config)
        memory = [torch.zeros(lanes, kv, past + tokens, width) for _ in range(2)]
        window = [torch.zeros(config.window - 1 + tokens, lanes, 2, kv, width) for _ in range(2)]
        self._held: list[object] = [*memory, *window]
        sizes = config.decoder_layers * layer_sizes(config) + [(config.d_model, 2 * config.d_model)]
        directions = (sizes, [(outputs, inputs) for inputs, outputs in sizes])
        self._passes = [
            _Loop(
                *(tokens, lanes, config.decoder_layers, config.heads, kv, width),
                *(config.window, past, past, len(layer_sizes(config))),
                self._weights(direction),
                *(tensor.data_ptr() for tensor in (*memory, *window)),
            )
            for direction in directions
        ]

    def __call__(self) -> int:
        """How many multiplications were done."""
        threads = torch.get_num_threads()
        return sum(self._run(byref(loop), back, threads) for back, loop in enumerate(self._passes))

    def _weights(self, sizes: list[tuple[int, int]]) -> int:
        """The address of packed weights, each in memory of its own as the loop's are."""
        packed = [torch.zeros(inputs, -(-outputs // _PANEL) * _PANEL) for inputs, outputs in sizes]
        pairs = zip(packed, sizes, strict=True)
        weights = (_Weight * len(sizes))(*(_Weight(w.data_ptr(), *size) for w, size in pairs))
        self._held += [*packed, weights]
        return addressof(weights)


class Floor:
    """A step that runs all products of a step of training."""

    def __init__(self, config: RltConfig, vocabulary: int, lanes: int, tokens: int) -> None:
        self._batched = Products(batched_products(config, vocabulary, lanes, tokens))
        self._loop = LoopProducts(config, lanes, tokens)

    def __call__(self) -> None:
        self._loop()
        self._batched()


def _past(config: RltConfig) -> int:
    """Entries of a full memory in front of a segment; its reach as well."""
    if config.memory_len is None:
        raise ValueError("a floor needs a memory of bounded length")
    return config.memory_len
