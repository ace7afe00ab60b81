"""The Recurrent Looped Transformer as a list of pieces and the function that composes them.

Zhang, Feng, Qin, "Recurrent Looped Transformer", arXiv 2610.07591.
"""

import math
from typing import Self

from torch import Tensor, nn

from rlt_dist.config.model import RltConfig
from rlt_dist.models.dropout import Dropout
from rlt_dist.models.initial import Distribution
from rlt_dist.models.rlt.decoder import decode
from rlt_dist.models.rlt.layers import DecoderLayer, EncoderLayer, KeyValue, Segment, append
from rlt_dist.models.rlt.pieces import Memory, Merge
from rlt_dist.models.state import State, counters
from rlt_dist.ops.cross_entropy import linear_cross_entropy, linear_logits, linear_nll
from rlt_dist.ops.noise import Noise
from rlt_dist.ops.precision import product_dtype
from rlt_dist.ops.reach import additive, newest, reach_mask, segment_positions
from rlt_dist.ops.recurrence.dispatch import DEFAULT, Recurrence
from rlt_dist.ops.rotary import rotary_tables


class RecurrentLoopedTransformer(nn.Module):
    """RLT-0, RLT-1 and RLT-2, tied or not; parameters carry the names of exported checkpoints.

    The pieces, in order: embed, encoder[i:j], memory, merge, decoder[i:j], head (output_norm and
    output).
    """

    def __init__(
        self, config: RltConfig, vocabulary: int, recurrence: Recurrence = DEFAULT
    ) -> None:
        super().__init__()
        self.config, self.vocabulary = config, vocabulary
        self.recurrence = recurrence
        self.embed = nn.utils.skip_init(nn.Embedding, vocabulary, config.d_model)
        encoder = [EncoderLayer(config) for _ in range(config.encoder_layers)]
        self.encoder = nn.ModuleList(encoder)
        self.memory = Memory(config)
        self.merge = Merge(config) if config.feedback else None
        tied = encoder if config.tied else [None] * config.decoder_layers
        self.decoder = nn.ModuleList(DecoderLayer(config, layer) for layer in tied)
        self.output_norm = nn.RMSNorm(config.d_model, eps=config.eps)
        self.output = (
            None
            if config.tie_output
            else nn.utils.skip_init(nn.Linear, config.d_model, vocabulary, bias=False)
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
        position, next_position = segment_positions(document_start, state["position"])
        x = self.embed(tokens)
        dropout = Dropout(self.config.dropout, noise)
        tables = rotary_tables(position, self.config.head_width, self.config.rotary_base, x.dtype)
        segment = Segment(position, tables, dropout)
        e, encoder_state = self._encode(dropout(x, "embed"), segment, state)
        memory, memory_state = self._remember(e, segment, state)
        s, decoder_state = decode(
            self.recurrence, self.config, self.decoder, self.merge, e, memory, segment, state
        )
        counts = {"position": next_position, "tokens": state["tokens"] + tokens.shape[1]}
        return s, counts | encoder_state | memory_state | decoder_state

    def _encode(self, x: Tensor, segment: Segment, state: State) -> tuple[Tensor, State]:
        """x [b, T, d] through every encoder layer."""
        limit = self.config.memory_len
        carried: State = {}
        seen = reach_mask(segment.position, state["encoder.0.k"].shape[1], limit)
        mask = additive(seen, product_dtype(x))
        for i, layer in enumerate(self.encoder):
            x, entries = layer(x, segment, _entries(state, f"encoder.{i}"), mask, i)
            carried |= _carried(f"encoder.{i}", entries, limit)
        return x, carried

    def _remember(self, e: Tensor, segment: Segment, state: State) -> tuple[list[KeyValue], State]:
        """Each group's memory: the carried entries followed by those of e [b, T, d]."""
        memory: list[KeyValue] = []
        carried: State = {}
        for g in range(self.config.memory_groups):
            new = self.memory(e, segment.tables, g)
            seen = append(_entries(state, f"memory.{g}"), new)
            carried |= _carried(f"memory.{g}", seen, self.config.memory_len)
            memory.append(seen)
        return memory, carried

    def logits(self, output: Tensor) -> Tensor:
        """Log-odds of the next token, [..., V] in float32 or wider, for outputs [..., d]."""
        return linear_logits(self.output_norm(output), self._output_weight(), None)

    def nll(self, output: Tensor, targets: Tensor) -> Tensor:
        """-log p(target), [b, T], for outputs [b, T, d] and targets int64 [b, T]."""
        hidden = self.output_norm(output.flatten(0, 1))
        nll = linear_nll(hidden, self._output_weight(), None, targets.flatten())
        return nll.view(targets.shape)

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """The sum of `nll` for outputs [n, d] and targets int64 [n]; backward can run only once."""
        hidden = self.output_norm(output)
        return linear_cross_entropy(hidden, self._output_weight(), None, targets)

    def _output_weight(self) -> Tensor:
        """[V, d]; the embedding's where they are tied."""
        return self.embed.weight if self.output is None else self.output.weight

    def empty_state(self, lanes: int) -> State:
        """The state of lanes that have seen nothing."""
        config, weight = self.config, self.embed.weight
        names = [f"encoder.{i}" for i in range(config.encoder_layers)]
        names += [f"memory.{g}" for g in range(config.memory_groups)]
        names += [f"decoder.{j}" for j in range(config.decoder_layers)]
        shape = (lanes, 0, config.key_value_heads, config.head_width)
        state = counters(lanes, weight.device)
        state |= {f"{name}.{part}": weight.new_zeros(shape) for name in names for part in "kv"}
        if config.feedback:
            state["s"] = weight.new_zeros(lanes, config.d_model)
        if config.feedback > 1:
            state["boundary"] = weight.new_zeros(lanes, config.d_model)
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
