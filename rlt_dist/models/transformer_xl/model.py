"""Transformer-XL as a list of pieces and the function that composes them.

Dai et al., "Transformer-XL: Attentive Language Models beyond a Fixed-Length Context", ACL 2019.
"""

import torch
from torch import Tensor, nn

from rlt_dist.config.model import TransformerXLConfig
from rlt_dist.models.dropout import Dropout
from rlt_dist.models.initial import Distribution
from rlt_dist.models.state import State, counters
from rlt_dist.models.transformer_xl.adaptive import AdaptiveEmbedding, AdaptiveSoftmax, Clusters
from rlt_dist.models.transformer_xl.layers import Layer, Segment
from rlt_dist.ops.noise import Noise, masked
from rlt_dist.ops.reach import newest, reach_mask, segment_positions
from rlt_dist.ops.relative import sinusoids


class TransformerXL(nn.Module):
    """Transformer-XL; parameters carry the names of the authors' checkpoints, tied ones once.

    The pieces, in order: embed (`word_emb`), layers[i:j], head (`crit`, with the embedding's
    tables). `r_w_bias` and `r_r_bias` are the u and v of the paper, which all layers share.

    State: `memory.n` [b, <= memory_len, d], the newest inputs of layer n, aligned right. It starts
    with no entries, and `position` says how many of them belong to the lane's document. memory_len,
    clamp_len and same_length name no parameter, so they may differ between training and
    evaluation, and a state may hold more entries than memory_len (the newest are read) or fewer.
    """

    def __init__(self, config: TransformerXLConfig, vocabulary: int) -> None:
        """Raises UserError where the adaptive softmax's cutoffs reach beyond the vocabulary."""
        super().__init__()
        self.config, self.vocabulary = config, vocabulary
        clusters = Clusters(config.cutoffs, vocabulary)
        self.word_emb = AdaptiveEmbedding(config, clusters)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.r_w_bias = nn.Parameter(torch.empty(config.heads, config.head_width))
        self.r_r_bias = nn.Parameter(torch.empty(config.heads, config.head_width))
        self.crit = AdaptiveSoftmax(config, clusters)

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
        """
        position, next_position = segment_positions(document_start, state["position"])
        dropout = Dropout(self.config.dropout, noise)
        x = dropout(self.word_emb(tokens), "embed")
        memory = [
            newest(state[f"memory.{n}"], self.config.memory_len) for n in range(len(self.layers))
        ]
        segment = self._segment(position, memory[0].shape[1], dropout, x.dtype)
        carried = {"position": next_position, "tokens": state["tokens"] + tokens.shape[1]}
        for n, layer in enumerate(self.layers):
            carried[f"memory.{n}"] = self._remember(memory[n], x)
            x = layer(x, memory[n], segment, n)
        return dropout(x, "output"), carried

    def _segment(
        self, position: Tensor, past: int, dropout: Dropout, dtype: torch.dtype
    ) -> Segment:
        """What all layers see of tokens at `position` [b, T] behind `past` memory positions."""
        config = self.config
        farthest = config.memory_len - 1 if config.same_length else None
        shape = past + position.shape[1], config.d_model
        relative = sinusoids(*shape, config.clamp_len, dtype, position.device)
        return Segment(
            allowed=reach_mask(position, past, farthest),
            relative=masked(relative, dropout.shared_mask("relative", shape)),
            biases=(self.r_w_bias, self.r_r_bias),
            dropout=dropout,
            dropatt=Dropout(config.dropatt, dropout.noise),
        )

    def _remember(self, memory: Tensor, x: Tensor) -> Tensor:
        """The newest memory_len positions of [memory ; x], in a tensor that keeps nothing else."""
        kept = newest(x, self.config.memory_len)
        older = newest(memory, self.config.memory_len - kept.shape[1])
        return torch.cat((older, kept), dim=1)

    def logits(self, output: Tensor) -> Tensor:
        """Log-odds of the next token, [..., V] in float32 or wider, for outputs [..., d].

        An adaptive softmax has no logits over all ids; its log-probabilities stand for them.
        """
        if self.config.cutoffs:
            return self.crit.log_probabilities(output, self.word_emb)
        return self.crit.head_logits(output, self.word_emb)

    def nll(self, output: Tensor, targets: Tensor) -> Tensor:
        """-log p(target), [b, T] in float32 or wider, for outputs [b, T, d], targets int64 [b, T].

        An adaptive softmax never forms [b, T, V].
        """
        nll = self.crit.nll(output.flatten(0, 1), targets.flatten(), self.word_emb)
        return nll.view(targets.shape)

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """The sum of `nll` for outputs [n, d] and targets int64 [n]; backward can run only once."""
        return self.crit.loss(output, targets, self.word_emb)

    def empty_state(self, lanes: int) -> State:
        """The state of lanes that have seen nothing."""
        empty = self.r_w_bias.new_zeros(lanes, 0, self.config.d_model)
        state = counters(lanes, empty.device)
        return state | {f"memory.{n}": empty.clone() for n in range(self.config.layers)}

    def initial_distribution(self, name: str, parameter: Tensor) -> Distribution:
        """Biases 0, norms N(1, 0.02), adaptive projections N(0, 0.01), all else N(0, 0.02)."""
        if name.endswith("layer_norm.weight"):
            return 1.0, 0.02
        if parameter.dim() == 1:
            return 0.0, 0.0
        return 0.0, 0.01 if "_projs." in name else 0.02
