"""Gated recurrent units as a list of pieces and the function that composes them.

Cho et al., "Learning Phrase Representations using RNN Encoder-Decoder", EMNLP 2014.
"""

from itertools import pairwise
from typing import Self

import torch
from torch import Tensor, nn

from rlt_dist.config.model import GruConfig
from rlt_dist.models.initial import Distribution
from rlt_dist.models.modules import unfilled
from rlt_dist.models.state import State, counters
from rlt_dist.ops.cross_entropy import linear_cross_entropy, linear_logits, linear_nll
from rlt_dist.ops.reach import segment_positions
from rlt_dist.ops.seam import WHOLE


class GatedRecurrentUnits(nn.Module):
    """The pieces, in order: embed, recur (gru), and the head (output). All are always here.

    State: `gru.{i}.h` [b, d], the output of layer i for the last token; 0 where a document starts.
    """

    def __init__(self, config: GruConfig, vocabulary: int) -> None:
        super().__init__()
        self.config, self.vocabulary = config, vocabulary
        d = config.d_model
        self.embed = unfilled(nn.Embedding, vocabulary, d)
        self.gru = nn.GRU(d, d, config.layers, batch_first=True)
        self.output = unfilled(nn.Linear, d, vocabulary, bias=False)

    def forward(
        self, tokens: Tensor, document_start: Tensor, state: State, _noise: object = None
    ) -> tuple[Tensor, State]:
        """Run one segment.

        Args:
            tokens: int64 [b, T].
            document_start: bool [b, T], True where a lane's state starts afresh.
            state: what the lanes carried here; gradients run into it unless it is detached.

        Returns:
            outputs of the last layer [b, T, d], and the state after the segment.
        """
        _, position = segment_positions(document_start, state["position"])
        counts = {"position": position, "tokens": state["tokens"] + document_start.shape[1]}
        outputs, carried = self.recur(self.embed(tokens), document_start, state)
        return outputs, counts | carried

    def recur(self, x: Tensor, document_start: Tensor, state: State) -> tuple[Tensor, State]:
        """x [b, T, d] through all layers, and the state; cut where a document starts in a lane."""
        names = [f"gru.{i}.h" for i in range(self.config.layers)]
        h, outputs = torch.stack([state[name] for name in names]), []
        starts = document_start.any(dim=0).nonzero()[:, 0].tolist()
        for begin, end in pairwise(sorted({0, *starts, x.shape[1]})):
            h = h.masked_fill(document_start[:, begin, None], 0)
            output, h = self.gru(x[:, begin:end], h)
            outputs.append(output)
        return torch.cat(outputs, dim=1), dict(zip(names, h.unbind(), strict=True))

    def logits(self, output: Tensor) -> Tensor:
        """Log-odds of the next token, [..., V] in float32 or wider, for outputs [..., d]."""
        return linear_logits(output, self.output.weight, None)

    def nll(self, output: Tensor, targets: Tensor) -> Tensor:
        """-log p(target), [b, T], for outputs [b, T, d] and targets int64 [b, T]."""
        hidden = output.flatten(0, 1)
        nll = linear_nll(hidden, self.output.weight, None, targets.flatten(), WHOLE)
        return nll.view(targets.shape)

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """The sum of `nll` for outputs [n, d] and targets int64 [n]; backward can run only once."""
        return linear_cross_entropy(output, self.output.weight, None, targets, WHOLE)

    def empty_state(self, lanes: int) -> State:
        """The state of lanes that have seen nothing."""
        weight = self.embed.weight
        return counters(lanes, weight.device) | {
            f"gru.{i}.h": weight.new_zeros(lanes, self.config.d_model)
            for i in range(self.config.layers)
        }

    def frozen(self) -> Self:
        """The model to evaluate with while its weights stand still: itself."""
        return self

    def initial_distribution(self, name: str, parameter: Tensor) -> Distribution:
        """Biases 0, embedding N(0, 1), head N(0, 0.02), all else N(0, 1 / inputs)."""
        if parameter.dim() == 1:
            return 0.0, 0.0
        known = {"embed.weight": 1.0, "output.weight": 0.02}
        return 0.0, known.get(name, parameter.shape[1] ** -0.5)
