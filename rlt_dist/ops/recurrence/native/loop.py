"""The compiled loop's passes over a tape: structs that mirror layer.h and segment.cpp."""

from ctypes import Structure, byref, c_double, c_float, c_int32, c_void_p
from functools import cached_property, lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlt_dist.ops.recurrence.loop import Pass
from rlt_dist.ops.recurrence.native.build import library
from rlt_dist.ops.recurrence.problem import LayerMasks, LayerWeights, Memory, Operands
from rlt_dist.ops.recurrence.tape import FeedbackTape, LayerTape, Tape

PANEL_BYTES = 256
"""Bytes of a packed row of a panel: four vectors of 64 bytes (kernels.h)."""

_FORWARD = [
    "attn_input",
    "attn_scale",
    "query",
    "weight",
    "cross_input",
    "cross_scale",
    "cross_query",
    "crossed",
    "ffn_input",
    "ffn_scale",
    "gate_up",
]
_BACKWARD = [
    "attended",
    "cross_weight",
    "d_attn",
    "d_qkv",
    "d_cross",
    "d_cross_q",
    "d_crossed",
    "d_score",
    "d_ffn",
    "d_gate_up",
]
_FEEDBACK = [
    "e",
    "gate_e",
    "initial",
    "boundary",
    "s",
    "ds",
    "y",
    "dy",
    "r",
    "r_scale",
    "fed",
    "dfed",
    "de",
    "dgate_e",
    "dinitial",
    "dboundary",
]


class _Packed(Structure):
    _fields_ = (("data", c_void_p), ("inputs", c_int32), ("outputs", c_int32))


class _Chunks(Structure):
    _fields_ = tuple((name, c_void_p) for name in ("first", "length", "fresh", "start"))


class _Layer(Structure):
    _fields_ = (
        *((name, _Packed) for name in LayerWeights._fields),
        *((f"{name}_t", _Packed) for name in LayerWeights._fields),
        *((f"memory_{name}", c_void_p) for name in Memory._fields),
        *((f"{name}_mask", c_void_p) for name in LayerMasks._fields),
        *((name, c_void_p) for name in ("entries", "dentries")),
        *((f"{name}_kept", c_void_p) for name in (*_FORWARD, *_BACKWARD)),
    )


@lru_cache
def _structs(real: Any) -> tuple[type[Structure], type[Structure]]:
    """Segment and Feedback for c_float or c_double."""
    sizes = [
        "tokens",
        "lanes",
        "d",
        "heads",
        "kv_heads",
        "width",
        "window",
        "ffn",
        "memory",
        "memory_rows",
        "past",
    ]
    tables = ["cos", "sin", "window_from", "memory_from"]

    class Segment(Structure):
        _fields_ = (
            *((name, c_int32) for name in sizes),
            ("eps", real),
            *((name, c_void_p) for name in tables),
        )

    class Feedback(Structure):
        _fields_ = (
            ("weight", _Packed),
            ("weight_t", _Packed),
            ("alpha", real),
            *((name, c_void_p) for name in _FEEDBACK),
        )

    return Segment, Feedback


class _Packs:
    """Weights [out, in], or their transposes, in panels [out / n][in][n], zeros beyond out."""

    def __init__(self, operands: Operands, *, transposed: bool) -> None:
        self._held: list[Tensor] = []
        self._transposed = transposed
        self.layers = [
            {name: self._pack(weight) for name, weight in weights._asdict().items()}
            for weights in operands.weights
        ]
        self.feedback = None if operands.fed is None else self._pack(operands.fed.weight)

    def _pack(self, weight: Tensor) -> _Packed:
        weight = weight.T if self._transposed else weight
        outputs, inputs = weight.shape
        columns = PANEL_BYTES // weight.element_size()
        panels = F.pad(weight, (0, 0, 0, -outputs % columns)).view(-1, columns, inputs)
        self._held.append(panels.transpose(1, 2).contiguous())
        return _Packed(self._held[-1].data_ptr(), inputs, outputs)


class NativeLoop:
    """The compiled loop; weights are packed once for all passes over a segment."""

    def __init__(self, operands: Operands) -> None:
        """Operands are float32 or float64."""
        self._operands = operands

    def precision(self, x: Tensor) -> torch.dtype:
        """That of x: autocast means nothing to it."""
        return x.dtype

    def forward(self, tape: Tape) -> Pass:
        """Fill the tape."""
        return _Pass(tape, self._forward_packs, backward=False)

    def backward(self, tape: Tape) -> Pass:
        """Fill its gradients, those of activations only."""
        return _Pass(tape, self._backward_packs, backward=True)

    @cached_property
    def _forward_packs(self) -> _Packs:
        return _Packs(self._operands, transposed=False)

    @cached_property
    def _backward_packs(self) -> _Packs:
        return _Packs(self._operands, transposed=True)


class _Pass:
    """Structs for a pass, made once for all of its calls, and the tensors that they point into."""

    def __init__(self, tape: Tape, packs: _Packs, *, backward: bool) -> None:
        self._held: list[Tensor] = []
        self._tape, self._packs, self._backward = tape, packs, backward
        self._dtype = tape.feedback.e.dtype
        double = self._dtype == torch.float64
        self._run = library().run_float64 if double else library().run_float32
        segment, feedback = _structs(c_double if double else c_float)
        layers = [
            self._layer(*of_layer) for of_layer in zip(tape.layers, packs.layers, strict=True)
        ]
        self._given = (
            byref(self._segment(segment(), tape)),
            (_Layer * len(layers))(*layers),
            len(layers),
            byref(self._feedback(feedback(), tape.feedback)),
            byref(self._chunks(tape)),
            int(backward),
        )

    def __call__(self, chunks: range) -> None:
        """Go through the chunks, the lanes split over torch's threads."""
        self._run(*self._given, torch.get_num_threads(), chunks.start, chunks.stop)

    def _hold(self, tensor: Tensor) -> int:
        """The address of a tensor that must live as long as this pass."""
        self._held.append(tensor.contiguous())
        return self._held[-1].data_ptr()

    def _address(self, tensor: Tensor) -> int:
        """The address of a buffer that the loop reads and writes as it stands.

        Raises:
            TypeError: it would read other numbers there than the tensor holds.
        """
        if tensor.dtype != self._dtype or not tensor.is_contiguous():
            raise TypeError(f"a buffer of {tensor.dtype}, strides {tensor.stride()}, is no array")
        return tensor.data_ptr()

    def _segment(self, segment: Any, tape: Tape) -> Any:
        plan, (_, lanes, d) = tape.plan, tape.feedback.e.shape
        shape, memory = plan.shape, tape.layers[0].memory.k.shape[2]
        sizes = (plan.chunks.tokens, lanes, d, shape.heads, shape.kv_heads, shape.head_width)
        ffn = tape.layers[0].weights.down.shape[1]
        rows = tape.layers[0].memory_rows
        window_from, memory_from = plan.ranges()
        segment.__init__(*sizes, shape.window, ffn, memory, rows, plan.past, shape.eps)
        segment.cos, segment.sin = (self._hold(x.to(self._dtype)) for x in (plan.cos, plan.sin))
        segment.window_from = self._hold(window_from.to(torch.int32))
        segment.memory_from = self._hold(memory_from.to(torch.int32))
        return segment

    def _layer(self, tape: LayerTape, packs: dict[str, _Packed]) -> _Layer:
        layer = _Layer(entries=self._address(tape.entries))
        for name, packed in packs.items():
            setattr(layer, f"{name}_t" if self._backward else name, packed)
        for name, tensor in tape.memory._asdict().items():
            setattr(layer, f"memory_{name}", self._address(tensor[0, 0]))
        for name, mask in tape.masks._asdict().items():
            if mask is not None:
                setattr(layer, f"{name}_mask", self._hold(mask.to(self._dtype)))
        for name, tensor in tape.kept.items():
            setattr(layer, f"{name}_kept", self._address(tensor))
        if self._backward:
            layer.dentries = self._address(tape.dentries)
        return layer

    def _feedback(self, feedback: Any, tape: FeedbackTape) -> Any:
        for name in _FEEDBACK:
            if hasattr(tape, name):
                setattr(feedback, name, self._address(getattr(tape, name)))
        if tape.inputs is not None:
            feedback.alpha = tape.alpha
            setattr(feedback, "weight_t" if self._backward else "weight", self._packs.feedback)
        return feedback

    def _chunks(self, tape: Tape) -> _Chunks:
        chunks = tape.plan.chunks
        first, length = (self._hold(x.to(torch.int32)) for x in (chunks.first, chunks.length))
        fresh, start = (self._hold(x.to(torch.uint8)) for x in (chunks.fresh, chunks.start))
        return _Chunks(first, length, fresh, start)
