"""What a model is: its shape and the choices that change what it computes."""

from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from rlt_dist.config.load import Strict

Probability = Annotated[float, Field(ge=0.0, lt=1.0)]


class RltConfig(Strict):
    """Recurrent Looped Transformer (arXiv 2610.07591), and what it is without its parts."""

    kind: Literal["rlt"] = "rlt"
    d_model: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt | None = None
    """Key/value heads, each shared by heads / kv_heads query heads; null: one per query head."""
    d_head: PositiveInt | None = None
    """Width of a head; null: d_model / heads."""
    ffn: PositiveInt
    """Inner width of the SwiGLU feed-forward."""
    encoder_layers: PositiveInt
    decoder_layers: NonNegativeInt
    """0: a plain Transformer, whose head reads the encoder."""
    window: PositiveInt = 8
    """W: tokens that the decoder's self-attention sees, the current one included."""
    memory_groups: PositiveInt = 1
    """G: how many key/value projections of the encoder memory the decoder layers share."""
    memory_len: NonNegativeInt | None = None
    """How many positions encoder and cross-attention reach back; null: the whole document."""
    feedback: NonNegativeInt = 1
    """B: tokens per chunk between feedbacks. 0: RLT-0 (none), 1: RLT-1, more: RLT-2."""
    feedback_from: Literal["state", "token"] = "state"
    """What the merge adds to a token. state: the output s of the token before it; token: that
    token's embedding instead, so that nothing is recurrent and all tokens run together."""
    alpha: float = 0.1
    """Weight of the fed-back state in the merge."""
    tied: bool = False
    """Decoder layer i reuses encoder layer i's self-attention and feed-forward weights."""
    tie_output: bool = False
    """The head reuses the embedding's weight."""
    dropout: Probability = 0.0
    eps: PositiveFloat = 1e-6
    rotary_base: PositiveFloat = 10000.0

    @property
    def head_width(self) -> int:
        return self.d_head if self.d_head is not None else self.d_model // self.heads

    @property
    def key_value_heads(self) -> int:
        return self.kv_heads if self.kv_heads is not None else self.heads

    @property
    def chunk(self) -> int:
        """Tokens of a chunk of the recurrence; 0: s is not fed back, all tokens run together."""
        return self.feedback if self.feedback_from == "state" else 0

    def memory_group(self, layer: int) -> int:
        """The group whose memory decoder layer `layer` reads."""
        return layer * self.memory_groups // self.decoder_layers

    @model_validator(mode="after")
    def _check(self) -> "RltConfig":
        if self.d_head is None and self.d_model % self.heads:
            raise ValueError(
                f"heads {self.heads} do not divide d_model {self.d_model}; change one or set d_head"
            )
        if self.head_width % 2:
            raise ValueError(f"a head of width {self.head_width} is odd; rotary pairs need it even")
        if self.heads % self.key_value_heads:
            raise ValueError(f"kv_heads {self.kv_heads} do not divide heads {self.heads}")
        if self.memory_groups > max(self.decoder_layers, 1):
            raise ValueError(
                f"memory_groups {self.memory_groups} exceed decoder_layers {self.decoder_layers}"
            )
        if self.tied and self.encoder_layers != self.decoder_layers:
            raise ValueError(
                f"tied layers need as many encoder_layers ({self.encoder_layers}) as "
                f"decoder_layers ({self.decoder_layers})"
            )
        if self.decoder_layers == 0 and self.feedback:
            raise ValueError(
                f"decoder_layers 0 leaves nothing to feed back, and feedback is {self.feedback}; "
                "set feedback 0"
            )
        if self.feedback_from == "token" and self.feedback != 1:
            raise ValueError(
                f"feedback_from token has no chunks, and feedback is {self.feedback}; "
                "set feedback 1"
            )
        return self


class TransformerXLConfig(Strict):
    """Transformer-XL (Dai et al., ACL 2019)."""

    kind: Literal["transformer_xl"] = "transformer_xl"
    d_model: PositiveInt
    heads: PositiveInt
    d_head: PositiveInt | None = None
    """Width of a head; null: d_model / heads."""
    d_inner: PositiveInt
    """Inner width of the feed-forward."""
    layers: PositiveInt
    memory_len: NonNegativeInt
    """Positions of the layer's earlier inputs that are kept as memory."""
    same_length: bool = False
    """Every query sees the same number of keys, distance 0 .. memory_len - 1."""
    clamp_len: PositiveInt | None = None
    """Distances beyond this share one relative position; null: none are clamped."""
    cutoffs: tuple[PositiveInt, ...] = ()
    """Adaptive softmax: first id of each further cluster; empty: one plain softmax."""
    div_val: PositiveInt = 1
    """Adaptive softmax: each further cluster's embedding is narrower by this factor."""
    tie_projections: bool = True
    """Adaptive softmax: a tail's projection is the embedding's (false: One Billion Word)."""
    pre_norm: bool = False
    dropout: Probability = 0.0
    dropatt: Probability = 0.0
    """Dropout of attention weights."""

    @property
    def head_width(self) -> int:
        return self.d_head if self.d_head is not None else self.d_model // self.heads

    @model_validator(mode="after")
    def _check(self) -> "TransformerXLConfig":
        if self.d_head is None and self.d_model % self.heads:
            raise ValueError(
                f"heads {self.heads} do not divide d_model {self.d_model}; change one or set d_head"
            )
        if self.d_model % 2:
            raise ValueError(f"d_model {self.d_model} is odd; sinusoids come in pairs")
        if self.same_length and self.memory_len == 0:
            raise ValueError("same_length needs memory_len of at least 1: a query sees itself")
        if any(later <= earlier for earlier, later in pairwise(self.cutoffs)):
            raise ValueError(f"cutoffs {list(self.cutoffs)} are not ascending")
        if self.div_val > 1 and not self.cutoffs:
            raise ValueError(f"div_val {self.div_val} needs cutoffs: it narrows later clusters")
        narrowest = self.d_model // self.div_val ** len(self.cutoffs)
        if narrowest < 1 or self.d_model % self.div_val ** len(self.cutoffs):
            raise ValueError(
                f"div_val {self.div_val} to the power {len(self.cutoffs)} (the number of cutoffs) "
                f"does not divide d_model {self.d_model}"
            )
        return self


class GruConfig(Strict):
    """Gated recurrent units (Cho et al., EMNLP 2014) between an embedding and a head."""

    kind: Literal["gru"] = "gru"
    d_model: PositiveInt
    """Width of the embedding and of every layer's state."""
    layers: PositiveInt = 1


ModelConfig = Annotated[RltConfig | TransformerXLConfig | GruConfig, Field(discriminator="kind")]


def one_piece(model: ModelConfig) -> str | None:
    """The key and value for which a model has no stages for a pipeline; None: it has."""
    if isinstance(model, GruConfig):
        return "model.kind gru"
    if isinstance(model, RltConfig) and model.feedback_from == "token":
        return "model.feedback_from token"
    if isinstance(model, RltConfig) and model.decoder_layers == 0:
        return "model.decoder_layers 0"
    return None
