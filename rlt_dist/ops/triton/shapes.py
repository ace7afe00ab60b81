"""The sizes that a configuration gives kernels, on one process of its mesh."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch

from rlt_dist.config.model import GruConfig, RltConfig, TransformerXLConfig
from rlt_dist.config.run import RunConfig
from rlt_dist.ops.choice import size_trouble
from rlt_dist.util.errors import UserError

Dtype = Literal["bf16", "fp32"]


@dataclass(frozen=True)
class Shapes:
    """What one process has of each dimension: the largest part, where parts differ.

    Attributes:
        model: which kernels run at all.
        d: width of the model.
        heads, kv_heads, width: query heads, key/value heads, and the width of one.
        inner: inner width of the feed-forward.
        lanes: of a micro-batch.
        tokens: of a segment.
        memory: positions before the segment that attention reaches back.
        softmaxes: rows and width of each output matrix: the vocabulary's, or the adaptive
            softmax's head and then its tails.
        dtype: what products are formed in, by triton's name.
        window: RLT's W; 0 for Transformer-XL.
        chunk: RLT's tokens between feedbacks, at most a segment's; all of them where s is not fed
            back.
        part: RLT's tokens that backward recomputes at a time.
    """

    model: Literal["rlt", "transformer_xl"]
    d: int
    heads: int
    kv_heads: int
    width: int
    inner: int
    lanes: int
    tokens: int
    memory: int
    softmaxes: tuple[tuple[int, int], ...]
    dtype: Dtype = "bf16"
    window: int = 0
    chunk: int = 0
    part: int = 0

    @property
    def products(self) -> torch.dtype:
        """What products are formed in."""
        return torch.bfloat16 if self.dtype == "bf16" else torch.float32


def shapes_of(config: RunConfig, vocabulary: int) -> Shapes:
    """The shapes of a run with a vocabulary of so many ids.

    Raises:
        UserError: train.precision is float64, which kernels have not; the model is a GRU, for
            which there are none; heads or the window are larger than theirs; or see
            `RunConfig.micro_batch_lanes`.
    """
    if config.train.precision == "float64":
        raise UserError("no kernel computes in float64; take train.precision bfloat16 or float32")
    if isinstance(config.bounded_model, GruConfig):
        raise UserError("model.kind gru: there are no kernels for it; torch has its own")
    model, tensor, tokens = config.bounded_model, config.mesh.tensor, config.data.segment
    window = model.window if isinstance(model, RltConfig) else 0
    trouble = size_trouble(model.head_width, window)
    if trouble is not None:
        raise UserError(f"{trouble}; torch computes this attention")
    part, is_rlt = config.recompute.decoder_chunk, isinstance(model, RltConfig)
    key_value_heads = model.key_value_heads if isinstance(model, RltConfig) else model.heads
    inner = model.ffn if isinstance(model, RltConfig) else model.d_inner
    lanes = -(-config.data.lanes // (config.mesh.data or 1))
    return Shapes(
        model=model.kind,
        d=model.d_model,
        heads=model.heads // tensor,
        kv_heads=-(-key_value_heads // tensor),
        width=model.head_width,
        inner=-(-inner // tensor),
        lanes=config.micro_batch_lanes(lanes),
        tokens=tokens,
        memory=model.memory_len or 0,
        softmaxes=_softmaxes(config, vocabulary),
        dtype="bf16" if config.train.precision == "bfloat16" else "fp32",
        window=window,
        chunk=min(model.chunk or tokens, tokens) if isinstance(model, RltConfig) else 0,
        part=(min(part, tokens) if isinstance(part, int) else tokens) if is_rlt else 0,
    )


def _softmaxes(config: RunConfig, vocabulary: int) -> tuple[tuple[int, int], ...]:
    """Rows here and width, of each output matrix."""
    model, tensor = config.model, config.mesh.tensor
    if not isinstance(model, TransformerXLConfig) or not model.cutoffs:
        return ((-(-vocabulary // tensor), model.d_model),)
    if model.cutoffs[-1] >= vocabulary:
        raise UserError(f"cutoffs end at {model.cutoffs[-1]}, above the vocabulary of {vocabulary}")
    bounds = (0, *model.cutoffs, vocabulary)
    sizes = [-(-(last - first) // tensor) for first, last in pairwise(bounds)]
    sizes[0] += len(model.cutoffs)
    return tuple((size, model.d_model // model.div_val**i) for i, size in enumerate(sizes))
