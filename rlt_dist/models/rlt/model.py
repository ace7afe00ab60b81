"""The Recurrent Looped Transformer as a list of pieces and the function that composes them.

Zhang, Feng, Qin, "Recurrent Looped Transformer", arXiv 2610.07591.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Self

import torch
from torch import Tensor, nn

from rlt_dist.config.model import RltConfig
from rlt_dist.models.dropout import Dropout
from rlt_dist.models.initial import Distribution
from rlt_dist.models.modules import present, run_layer, unfilled
from rlt_dist.models.rlt.decoder import Decoder
from rlt_dist.models.rlt.layers import DecoderLayer, EncoderLayer, KeyValue, Segment, append, linear
from rlt_dist.models.rlt.pieces import Memory, Merge
from rlt_dist.models.state import State, counters
from rlt_dist.ops.cross_entropy import linear_cross_entropy, linear_logits, linear_nll
from rlt_dist.ops.embedding import lookup
from rlt_dist.ops.noise import Noise
from rlt_dist.ops.precision import product_dtype
from rlt_dist.ops.reach import Reach, newest, segment_positions
from rlt_dist.ops.recurrence.dispatch import DEFAULT, Recurrence
from rlt_dist.ops.recurrence.reference import boundary_after
from rlt_dist.ops.rotary import rotary_tables
from rlt_dist.ops.seam import WHOLE, Seam


class RecurrentLoopedTransformer(nn.Module):
    """RLT-0, RLT-1 and RLT-2, tied or not; parameters carry the names of exported checkpoints.

    Without decoder layers it is a plain Transformer: embed, encode, head. Fed with tokens, the
    merge stands before the decoder, and `s` of the state is the last token's embedding.

    The pieces, in order: embed, encode (encoder[i:j]), remember (memory), decode (merge and
    decoder[i:j]), head (output_norm and output). `forward` composes them. A piece works on the
    layers, the memory groups and the heads, columns and rows of weights that are here, all of them
    unless `parallel` took some away; `seam` is where what is cut is joined.
    """

    seam: Seam = WHOLE

    def __init__(
        self,
        config: RltConfig,
        vocabulary: int,
        recurrence: Recurrence = DEFAULT,
        recompute_layers: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.vocabulary = config, vocabulary
        self.recurrence, self._recompute = recurrence, recompute_layers
        self.embed: nn.Embedding | None = unfilled(nn.Embedding, vocabulary, config.d_model)
        encoder = [EncoderLayer(config) for _ in range(config.encoder_layers)]
        self.encoder = _numbered(encoder)
        self.memory: Memory | None = Memory(config) if config.decoder_layers else None
        self.merge: Merge | None = Merge(config) if config.feedback else None
        tied = encoder if config.tied else [None] * config.decoder_layers
        self.decoder = _numbered(DecoderLayer(config, layer) for layer in tied)
        self.output_norm: nn.RMSNorm | None = nn.RMSNorm(config.d_model, eps=config.eps)
        self.output: nn.Linear | None = (
            None if config.tie_output else linear(config.d_model, vocabulary)
        )

    def forward(
        self, tokens: Tensor, document_start: Tensor, state: State, noise: Noise | None = None
    ) -> tuple[Tensor, State]:
        """Run one segment.

        Args:
            tokens: int64 [b, T].
            document_start: bool [b, T], True where a lane's state starts afresh.
            state: what the lanes carried here; gradients run into it unless it is detached.
            noise: names the dropout masks; None: nothing drops.

        Returns:
            decoder outputs s [b, T, d], and the state after the segment.
        """
        segment, counts = self.begin(document_start, state, noise)
        x = self.embedded(tokens, segment)
        e, encoder_state = self.encode(x, segment, state)
        after = counts | encoder_state
        if self.memory is None:
            return e, after
        memory, memory_state = self.remember(e, segment, state)
        if self.config.feedback_from == "token":
            e = self.merge_tokens(e, x, segment, state)
            after["s"] = x[:, -1]
        s, decoder_state = self.decode(e, memory, segment, state)
        return s, after | memory_state | decoder_state

    def begin(
        self, document_start: Tensor, state: State, noise: Noise | None
    ) -> tuple[Segment, State]:
        """What every piece sees of a segment, and the state's counters after it."""
        config, like = self.config, next(self.parameters())
        position, after = segment_positions(document_start, state["position"])
        tables = rotary_tables(position, config.head_width, config.rotary_base, like.dtype)
        counts = {"position": after, "tokens": state["tokens"] + document_start.shape[1]}
        return Segment(position, tables, Dropout(config.dropout, noise)), counts

    def embedded(self, tokens: Tensor, segment: Segment) -> Tensor:
        """int64 [b, T] to [b, T, d]."""
        weight = present(self.embed).weight
        return segment.dropout(lookup(tokens, weight, self.vocabulary, self.seam), "embed")

    def encode(self, x: Tensor, segment: Segment, state: State) -> tuple[Tensor, State]:
        """x [b, T, d] through the encoder layers that are here, and their part of the state."""
        limit, carried = self.config.memory_len, State()
        past = state[f"encoder.{next(iter(self.encoder))}.k"].shape[1]
        reach = Reach(segment.position, past, limit, product_dtype(x))
        for i, layer in self.encoder.items():
            given = (x, segment, _entries(state, f"encoder.{i}"), reach, int(i))
            x, seen = run_layer(layer, *given, recompute=self._recompute)
            carried |= _carried(f"encoder.{i}", seen, limit)
        return x, carried

    def remember(
        self, e: Tensor, segment: Segment, state: State
    ) -> tuple[dict[int, KeyValue], State]:
        """By group, the memory: carried entries followed by those of e [b, T, d]; its state."""
        memory: dict[int, KeyValue] = {}
        carried: State = {}
        for group, new in present(self.memory)(e, segment.tables).items():
            memory[group] = append(_entries(state, f"memory.{group}"), new)
            carried |= _carried(f"memory.{group}", memory[group], self.config.memory_len)
        return memory, carried

    def merge_tokens(self, e: Tensor, x: Tensor, segment: Segment, state: State) -> Tensor:
        """e [b, T, d] with the embedding of the token before each, of x [b, T, d], merged in."""
        before = torch.cat((state["s"][:, None], x[:, :-1]), dim=1)
        return present(self.merge).tokens(e, before, segment.position == 0)

    def decode(
        self, e: Tensor, memory: Mapping[int, KeyValue], segment: Segment, state: State
    ) -> tuple[Tensor, State]:
        """The whole decoder: outputs s [b, T, d] for encoder outputs e, and its state."""
        decoder = self.decoder_here()
        plan, operands = decoder.problem(e, memory, segment, state, decoder.folded())
        s, windows = self.recurrence.run(plan, operands)
        carried = decoder.carried(plan, windows)
        if operands.fed is not None:
            carried["s"] = s[-1]
            if "boundary" in state:
                carried["boundary"] = boundary_after(plan, operands.fed, s)
        return s.transpose(0, 1), carried

    def decoder_here(self) -> Decoder:
        """The decoder layers that are here, for the recurrence core."""
        fed_back = self.merge if self.config.chunk else None
        return Decoder(self.config, self.decoder, fed_back, self.seam)

    def logits(self, output: Tensor) -> Tensor:
        """Log-odds of the next token, [..., V] in float32 or wider, for outputs [..., d]."""
        hidden, weight = self._head(output)
        return linear_logits(hidden, weight, None)

    def nll(self, output: Tensor, targets: Tensor) -> Tensor:
        """-log p(target), [b, T], for outputs [b, T, d] and targets int64 [b, T]."""
        hidden, weight = self._head(output.flatten(0, 1))
        nll = linear_nll(hidden, weight, None, self._own(targets.flatten()), self.seam)
        return nll.view(targets.shape)

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """The sum of `nll` for outputs [n, d] and targets int64 [n]; backward can run only once."""
        hidden, weight = self._head(output)
        return linear_cross_entropy(hidden, weight, None, self._own(targets), self.seam)

    def _own(self, targets: Tensor) -> Tensor:
        """Targets numbered from the first row of the vocabulary that is here."""
        return targets - self.seam.own(self.vocabulary).start

    def _head(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """The normed outputs and the weight [V, d]: the embedding's where they are tied."""
        weight = present(self.embed).weight if self.output is None else self.output.weight
        return present(self.output_norm)(self.seam.enter(output)), weight

    def empty_state(self, lanes: int) -> State:
        """The state of lanes that have seen nothing, of what is here."""
        config, like = self.config, next(self.parameters())
        projections = {
            f"{stack}.{number}": layer.get_submodule("attn.k")
            for stack, layers in (("encoder", self.encoder), ("decoder", self.decoder))
            for number, layer in layers.items()
        }
        groups = {} if self.memory is None else self.memory.groups()
        projections |= {f"memory.{g}": group.k for g, group in groups.items()}
        state = counters(lanes, like.device)
        for name, projection in projections.items():
            heads = len(projection.get_parameter("weight")) // config.head_width
            empty = like.new_zeros(lanes, 0, heads, config.head_width)
            state |= {f"{name}.k": empty, f"{name}.v": empty}
        if self.merge is not None:
            state["s"] = like.new_zeros(lanes, config.d_model)
            if config.feedback > 1:
                state["boundary"] = like.new_zeros(lanes, config.d_model)
        return state

    def frozen(self) -> Self:
        """The model to evaluate with while its weights stand still: itself.

        It carries keys and values in any case, and derives nothing from its weights alone.
        """
        return self

    def initial_distribution(self, name: str, parameter: Tensor) -> Distribution:
        """Norms 1, biases 0, embedding and head N(0, 0.02), projections N(0, 1 / inputs).

        A residual branch's last projection is narrower by sqrt(2 L), L the number of layers on
        the path, so that the residual stream of a deep stack starts near its input.
        """
        if parameter.dim() == 1:
            return (1.0, 0.0) if "norm" in name else (0.0, 0.02 if "initial" in name else 0.0)
        if name in ("embed.weight", "output.weight"):
            return 0.0, 0.02
        deviation = parameter.shape[1] ** -0.5
        if name.endswith(("o.weight", "down.weight")):
            layers = self.config.encoder_layers + self.config.decoder_layers
            deviation /= math.sqrt(2 * layers)
        return 0.0, deviation


def _entries(state: State, name: str) -> KeyValue:
    return KeyValue(state[f"{name}.k"], state[f"{name}.v"])


def _carried(name: str, seen: KeyValue, limit: int | None) -> State:
    return {f"{name}.k": newest(seen.k, limit), f"{name}.v": newest(seen.v, limit)}


def _numbered(layers: Iterable[nn.Module]) -> nn.ModuleDict:
    """Layers by their number in the whole stack, of which some may be taken away."""
    return nn.ModuleDict({str(number): layer for number, layer in enumerate(layers)})
