"""Transformer-XL as a list of pieces and the function that composes them.

Dai et al., "Transformer-XL: Attentive Language Models beyond a Fixed-Length Context", ACL 2019.
"""

import torch
from torch import Tensor, nn

from rlt_dist.config.model import TransformerXLConfig
from rlt_dist.models.dropout import Dropout
from rlt_dist.models.initial import Distribution
from rlt_dist.models.modules import present, run_layer
from rlt_dist.models.state import State, counters
from rlt_dist.models.transformer_xl.adaptive import AdaptiveEmbedding, AdaptiveSoftmax, Clusters
from rlt_dist.models.transformer_xl.frozen import Derived, Guard
from rlt_dist.models.transformer_xl.layers import KeyValue, Layer, Segment
from rlt_dist.ops.noise import Noise, masked
from rlt_dist.ops.precision import product_dtype
from rlt_dist.ops.reach import Reach, newest, segment_positions
from rlt_dist.ops.relative import sinusoids


class TransformerXL(nn.Module):
    """Transformer-XL; parameters carry the names of the authors' checkpoints, tied ones once.

    The pieces, in order: `embedded` (`word_emb`), `run_layers`, and the head: `finish`, `loss` or
    `nll` (`crit`, with the embedding's tables). `r_w_bias` and `r_r_bias` are the u and v of the
    paper, which all layers share. A stage of a pipeline is a model from which others' layers are
    deleted, and `word_emb` and `crit` (set to None) where no piece reads them; it calls `begin` and
    then its pieces, and its states hold the memories of its layers.

    State: `memory.n` [b, <= memory_len, d], the newest inputs of layer n, aligned right. It starts
    with no entries, and `position` says how many of them belong to the lane's document. memory_len,
    clamp_len and same_length name no parameter, so they may differ between training and
    evaluation, and a state may hold more entries than memory_len (the newest are read) or fewer.
    """

    def __init__(
        self, config: TransformerXLConfig, vocabulary: int, recompute_layers: bool = False
    ) -> None:
        """Make the parameters, not yet filled.

        Args:
            recompute_layers: keep each layer's input alone for backward, which runs the layer
                again; it changes no result.

        Raises:
            UserError: the adaptive softmax's cutoffs reach beyond the vocabulary.
        """
        super().__init__()
        self.config, self.vocabulary = config, vocabulary
        self.recompute_layers = recompute_layers
        clusters = Clusters(config.cutoffs, vocabulary)
        self.word_emb: AdaptiveEmbedding | None = AdaptiveEmbedding(config, clusters)
        self.layers = nn.ModuleDict({str(n): Layer(config) for n in range(config.layers)})
        self.r_w_bias = nn.Parameter(torch.empty(config.heads, config.head_width))
        self.r_r_bias = nn.Parameter(torch.empty(config.heads, config.head_width))
        self.crit: AdaptiveSoftmax | None = AdaptiveSoftmax(config, clusters)

    def forward(
        self, tokens: Tensor, document_start: Tensor, state: State, noise: Noise | None = None
    ) -> tuple[Tensor, State]:
        """Run one segment.

        Args:
            tokens: int64 [b, T].
            document_start: bool [b, T], True where a lane's state starts afresh.
            state: what the lanes carried here; the paper's model has no gradient into it, so
                training detaches it between segments.
            noise: names the dropout masks; None: nothing drops.

        Returns:
            last hidden states [b, T, d], after dropout, and the state after the segment.

        Raises:
            RuntimeError: the state is one of `frozen()`: its keys are of weights that may have
                moved since, and their gradient would be lost.
        """
        return self._run(tokens, document_start, state, noise)

    def _run(
        self,
        tokens: Tensor,
        document_start: Tensor,
        state: State,
        noise: Noise | None = None,
        derived: Derived | None = None,
    ) -> tuple[Tensor, State]:
        """`forward`, with what is known of weights that stand still."""
        segment, counts = self.begin(document_start, state, noise, derived)
        x, memories = self.run_layers(self.embedded(tokens, segment), segment, state)
        return self.finish(x, segment), counts | memories

    def begin(
        self,
        document_start: Tensor,
        state: State,
        noise: Noise | None = None,
        derived: Derived | None = None,
    ) -> tuple[Segment, State]:
        """What all pieces share of a segment, and the counters after it.

        Args:
            document_start, state, noise: as in `forward`.
            derived: what is known of weights that stand still.

        Raises:
            RuntimeError: as in `forward`.
        """
        if derived is None and not all(f"memory.{n}" in state for n in self.layers):
            raise RuntimeError(
                "a state of frozen() is read only by what made it; begin with empty_state()"
            )
        config, length = self.config, document_start.shape[1]
        position, after = segment_positions(document_start, state["position"])
        dropout = Dropout(config.dropout, noise)
        past = self._past_length(state)
        farthest = config.memory_len - 1 if config.same_length else None
        segment = Segment(
            reach=Reach(position, past, farthest, self.r_w_bias.dtype),
            biases=(self.r_w_bias, self.r_r_bias),
            relative=self._relative(past + length, dropout, derived),
            dropout=dropout,
            dropatt=Dropout(config.dropatt, noise),
        )
        return segment, {"position": after, "tokens": state["tokens"] + length}

    def embedded(self, tokens: Tensor, segment: Segment) -> Tensor:
        """What the first layer is given, [b, T, d], for ids int64 [b, T]."""
        return segment.dropout(present(self.word_emb)(tokens), "embed")

    def run_layers(self, x: Tensor, segment: Segment, state: State) -> tuple[Tensor, State]:
        """x [b, T, d] through the layers that are here, and their memories after the segment."""
        memories: State = {}
        for name, layer in self.layers.items():
            n, given = int(name), x
            past = self._past(state, n)
            x, seen = run_layer(layer, x, past, segment, n, recompute=self.recompute_layers)
            memories |= self._remember(state, n, given, seen)
        return x, memories

    def finish(self, x: Tensor, segment: Segment) -> Tensor:
        """The last hidden states, [b, T, d], of what the last layer gives."""
        return segment.dropout(x, "output")

    def _relative(
        self, count: int, dropout: Dropout, derived: Derived | None
    ) -> Tensor | list[Tensor]:
        """`Segment.relative` for distances count - 1 .. 0."""
        like, config = self.r_w_bias, self.config

        def make(count: int) -> Tensor:
            shape = (count, config.d_model)
            relative = sinusoids(*shape, config.clamp_len, like.dtype, like.device)
            return masked(relative, dropout.shared_mask("relative", shape)).flip(0)

        def project(count: int) -> list[Tensor]:
            relative = make(count)
            layers = self.layers.values()
            return [layer.get_submodule("dec_attn.r_net")(relative) for layer in layers]

        if derived is None:
            return make(count)
        return derived.projected(count, project, (config.clamp_len, product_dtype(like)))

    def _past_length(self, state: State) -> int:
        """How many memory positions stand before the segment, alike in all layers."""
        for n in self.layers:
            past = self._past(state, int(n))
            return (past.k if isinstance(past, KeyValue) else past).shape[1]
        return 0

    def _past(self, state: State, n: int) -> Tensor | KeyValue:
        """Layer n's memory in the form in which `state` has it."""
        name, limit = f"memory.{n}", self.config.memory_len
        if name in state:
            return newest(state[name], limit)
        return KeyValue(newest(state[f"{name}.k"], limit), newest(state[f"{name}.v"], limit))

    def _remember(self, state: State, n: int, given: Tensor, seen: KeyValue) -> State:
        """Layer n's memory after a segment, in the form in which `state` has it.

        Inputs are copied where they would keep more than themselves alive; keys and values are the
        end of what the next segment copies anyway.
        """
        name, limit = f"memory.{n}", self.config.memory_len
        if name not in state:
            return {f"{name}.k": newest(seen.k, limit), f"{name}.v": newest(seen.v, limit)}
        if given.shape[1] == limit:
            return {name: given}
        kept = newest(given, limit)
        return {name: torch.cat((newest(state[name], limit - kept.shape[1]), kept), dim=1)}

    def logits(self, output: Tensor) -> Tensor:
        """Log-odds of the next token, [..., V] in float32 or wider, for outputs [..., d].

        An adaptive softmax has no logits over all ids; its log-probabilities stand for them.
        """
        if self.config.cutoffs:
            return present(self.crit).log_probabilities(output, present(self.word_emb))
        return present(self.crit).head_logits(output, present(self.word_emb))

    def nll(self, output: Tensor, targets: Tensor) -> Tensor:
        """-log p(target), [b, T] in float32 or wider, for outputs [b, T, d], targets int64 [b, T].

        An adaptive softmax never forms [b, T, V].
        """
        hidden, embedding = output.flatten(0, 1), present(self.word_emb)
        return present(self.crit).nll(hidden, targets.flatten(), embedding).view(targets.shape)

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """The sum of `nll` for outputs [n, d] and targets int64 [n]; backward can run only once."""
        return present(self.crit).loss(output, targets, present(self.word_emb))

    def empty_state(self, lanes: int) -> State:
        """The state of lanes that have seen nothing, of the layers that are here."""
        like, shape = self.r_w_bias, (lanes, 0, self.config.d_model)
        memory = {f"memory.{n}": like.new_zeros(shape) for n in self.layers}
        return counters(lanes, like.device) | memory

    def frozen(self) -> "FrozenTransformerXL":
        """The model to evaluate with while its weights stand still, which the caller promises."""
        return FrozenTransformerXL(self)

    def initial_distribution(self, name: str, parameter: Tensor) -> Distribution:
        """Biases 0, norms N(1, 0.02), adaptive projections N(0, 0.01), all else N(0, 0.02)."""
        if name.endswith("layer_norm.weight"):
            return 1.0, 0.02
        if parameter.dim() == 1:
            return 0.0, 0.0
        return 0.0, 0.01 if "_projs." in name else 0.02


class FrozenTransformerXL:
    """Transformer-XL without gradients, while its weights stand still; results are the same.

    What depends on weights alone is made once: relative positions are projected for the first
    segment, and states carry the keys and values of each layer's memory, `memory.n.k` and
    `memory.n.v` [b, <= memory_len, H, d_head], in place of `memory.n`, so that no segment projects
    the memory again. All of it is out of date once a weight moves, so neither this object nor a
    state of it is to be used from then on; `Guard` says which changes are noticed. The model
    itself knows nothing of it, and may be used in between.
    """

    def __init__(self, model: TransformerXL) -> None:
        self._model, self._derived = model, Derived()
        self._guard = Guard(model.parameters())

    def __call__(
        self, tokens: Tensor, document_start: Tensor, state: State
    ) -> tuple[Tensor, State]:
        """As `TransformerXL.forward` without noise.

        Raises:
            RuntimeError: gradients are enabled, or a weight was seen to have moved.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                "frozen() gives no gradients; run it under torch.no_grad(), or train the model"
            )
        self._guard.check()
        return self._model._run(tokens, document_start, state, derived=self._derived)

    def logits(self, output: Tensor) -> Tensor:
        """As `TransformerXL.logits`."""
        return self._model.logits(output)

    def nll(self, output: Tensor, targets: Tensor) -> Tensor:
        """As `TransformerXL.nll`."""
        return self._model.nll(output, targets)

    def empty_state(self, lanes: int) -> State:
        """The state of lanes that have seen nothing, of keys and values."""
        like = self._model.r_w_bias
        names = [f"memory.{n}.{part}" for n in self._model.layers for part in "kv"]
        shape = (lanes, 0, *like.shape)
        return counters(lanes, like.device) | {name: like.new_zeros(shape) for name in names}
