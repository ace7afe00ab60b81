"""Adaptive input and softmax: frequent ids get wide vectors and a short softmax, rare ones less.

Grave et al., "Efficient softmax approximation for GPUs", ICML 2017, in the form of the
Transformer-XL authors (Dai et al., ACL 2019), whose parameter names these modules carry. Ids must
be ranked by frequency. They fall into clusters: cluster 0 is the head, clusters 1 .. N the tails;
without cutoffs there is the head alone, a plain embedding and softmax.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlt_dist.config.model import TransformerXLConfig
from rlt_dist.ops.cross_entropy import linear_cross_entropy, linear_logits, linear_nll
from rlt_dist.util.errors import UserError

_Softmax = tuple[Tensor, Tensor, Tensor, Tensor]
"""hidden [n, width], weight [V, width], bias [V], targets int64 [n] of a linear softmax."""


class Clusters:
    """The contiguous ranges of ids that cutoffs make.

    Attributes:
        bounds: 0, the cutoffs, the vocabulary; cluster i has the ids bounds[i] .. bounds[i+1] - 1.
        tails: N, the clusters behind the head.
        head_columns: what the head's softmax chooses from, its own words and then the tails. Tail
            i is column head_columns - i: the authors number the cluster logits backwards.
    """

    def __init__(self, cutoffs: tuple[int, ...], vocabulary: int) -> None:
        """Raises UserError where the last cluster would have no ids."""
        if cutoffs and cutoffs[-1] >= vocabulary:
            raise UserError(
                f"cutoffs end at {cutoffs[-1]}, but the vocabulary has {vocabulary} ids; "
                "lower or remove the cutoffs that are not below it"
            )
        self.bounds = (0, *cutoffs, vocabulary)
        self.tails = len(cutoffs)
        self.head_columns = self.bounds[1] + self.tails

    def size(self, cluster: int) -> int:
        return self.bounds[cluster + 1] - self.bounds[cluster]

    def split(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """A tensor for each cluster, [its ids, ...], given these or one of all ids.

        The backward of a split joins the gradients in one copy; that of a slice would fill an
        array of the whole's size for every cluster.
        """
        if len(tensors) > self.tails:
            return tensors
        return tensors[0].split([self.size(i) for i in range(self.tails + 1)])

    def of(self, ids: Tensor) -> Tensor:
        """The cluster, int64, of each id."""
        cluster = torch.zeros_like(ids)
        for cutoff in self.bounds[1:-1]:
            cluster = cluster + (ids >= cutoff)
        return cluster


class AdaptiveEmbedding(nn.Module):
    """P_i E_i[id - cutoff] sqrt(d): a table of width d / div_val^i per cluster, projected to d.

    With div_val 1 there is one table of width d, and no projections.
    """

    def __init__(self, config: TransformerXLConfig, clusters: Clusters) -> None:
        super().__init__()
        d, self.clusters, self.narrowed = config.d_model, clusters, config.div_val > 1
        widths = [d // config.div_val**i for i in range(clusters.tails + 1)]
        sizes = [clusters.size(i) for i in range(clusters.tails + 1)]
        tables = zip(sizes, widths, strict=True) if self.narrowed else [(clusters.bounds[-1], d)]
        self.emb_layers = nn.ModuleList(_table(size, width) for size, width in tables)
        self.emb_projs = nn.ParameterList(
            [torch.empty(d, width) for width in widths] if self.narrowed else []
        )
        self.scale = d**0.5

    def tables(self) -> Sequence[Tensor]:
        """E_i, [ids of the cluster, width], by cluster."""
        return self.clusters.split([layer.get_parameter("weight") for layer in self.emb_layers])

    def forward(self, tokens: Tensor) -> Tensor:
        """Ids int64 [b, T] to [b, T, d] in the parameters' dtype.

        Every cluster projects every token and keeps its own. Later clusters are narrow, so this
        costs little, and no shape, hence no last bit, depends on the tokens around a token.
        """
        if not self.narrowed:
            return self.emb_layers[0](tokens) * self.scale
        cluster, x = self.clusters.of(tokens), self.emb_projs[0].new_zeros(())
        for i, projection in enumerate(self.emb_projs):
            inside = cluster == i
            local = (tokens - self.clusters.bounds[i]).masked_fill(~inside, 0)
            # Autocast would leave the residual stream and the memory in bfloat16.
            projected = F.linear(self.emb_layers[i](local), projection).to(projection.dtype)
            x = torch.where(inside[..., None], projected, x)
        return x * self.scale


class TiedOutput(nn.Module):
    """An output layer's own bias; its weight is the embedding's table."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(size))


class AdaptiveSoftmax(nn.Module):
    """One softmax over the head's words and N cluster logits, and one within each tail.

    Weights, and the projections of the tails where they are tied, are the embedding's, which every
    method is given: the head of a model may stand on another pipeline stage than its embedding.
    """

    def __init__(self, config: TransformerXLConfig, clusters: Clusters) -> None:
        super().__init__()
        d, self.clusters, self.tied = config.d_model, clusters, config.tie_projections
        narrowed = config.div_val > 1
        every = range(clusters.tails + 1)
        sizes = [clusters.size(i) for i in every] if narrowed else [clusters.bounds[-1]]
        self.out_layers = nn.ModuleList(TiedOutput(size) for size in sizes)
        # The head's projection is its own even where the tails' are tied.
        own = [i for i in every if i == 0 or not self.tied] if narrowed else []
        self.out_projs = nn.ParameterList([torch.empty(d, d // config.div_val**i) for i in own])
        if clusters.tails:
            self.cluster_weight = nn.Parameter(torch.empty(clusters.tails, d))
            self.cluster_bias = nn.Parameter(torch.empty(clusters.tails))

    def nll(self, hidden: Tensor, targets: Tensor, embedding: AdaptiveEmbedding) -> Tensor:
        """-log p(target), [n], for hidden [n, d] and targets int64 [n]."""
        (_, head), *tails = self._softmaxes(hidden, targets, embedding)
        nll = linear_nll(*head)
        for rows, tail in tails:
            nll = nll.index_add(0, rows, linear_nll(*tail))
        return nll

    def loss(self, hidden: Tensor, targets: Tensor, embedding: AdaptiveEmbedding) -> Tensor:
        """The sum of `nll`, a scalar whose backward can run only once."""
        softmaxes = self._softmaxes(hidden, targets, embedding)
        return torch.stack([linear_cross_entropy(*softmax) for _, softmax in softmaxes]).sum()

    def log_probabilities(self, hidden: Tensor, embedding: AdaptiveEmbedding) -> Tensor:
        """log p of every id, [..., V], for hidden [..., d]."""
        head = self.head_logits(hidden, embedding).log_softmax(dim=-1)
        parts = [head[..., : self.clusters.bounds[1]]]
        for i, layer in enumerate(self._layers(embedding)[1:], start=1):
            projected = self._project(hidden, embedding, i)
            tail = linear_logits(projected, *layer).log_softmax(dim=-1)
            parts.append(head[..., self.clusters.head_columns - i, None] + tail)
        return torch.cat(parts, dim=-1)

    def head_logits(self, hidden: Tensor, embedding: AdaptiveEmbedding) -> Tensor:
        """Logits of [the head's words ; N clusters], [..., c_0 + N], float32 or wider."""
        projected = self._project(hidden, embedding, 0)
        words = linear_logits(projected, *self._layers(embedding)[0])
        if not self.clusters.tails:
            return words
        clusters = linear_logits(projected, self.cluster_weight, self.cluster_bias)
        return torch.cat((words, clusters), dim=-1)

    def _softmaxes(
        self, hidden: Tensor, targets: Tensor, embedding: AdaptiveEmbedding
    ) -> Iterator[tuple[Tensor, _Softmax]]:
        """The head's softmax, then the tails', each with the rows, int64, that choose from it.

        A tail's are those whose target it holds: its logits are never formed for the others.
        """
        cluster, layers = self.clusters.of(targets), self._layers(embedding)
        column = torch.where(cluster == 0, targets, self.clusters.head_columns - cluster)
        every = torch.arange(len(targets), device=targets.device)
        weight, bias = layers[0]
        if self.clusters.tails:
            # Copying the table costs less than copying the logits of many tokens.
            weight = torch.cat((weight, self.cluster_weight))
            bias = torch.cat((bias, self.cluster_bias))
        yield every, (self._project(hidden, embedding, 0), weight, bias, column)
        for i in range(1, self.clusters.tails + 1):
            rows = (cluster == i).nonzero()[:, 0]
            local = targets[rows] - self.clusters.bounds[i]
            yield rows, (self._project(hidden[rows], embedding, i), *layers[i], local)

    def _layers(self, embedding: AdaptiveEmbedding) -> list[tuple[Tensor, Tensor]]:
        """E_i, [ids of the cluster, width], and the bias of the words of every cluster."""
        biases = self.clusters.split([layer.get_parameter("bias") for layer in self.out_layers])
        return list(zip(embedding.tables(), biases, strict=True))

    def _project(self, hidden: Tensor, embedding: AdaptiveEmbedding, cluster: int) -> Tensor:
        """h P_i; h itself where nothing is narrowed."""
        if not embedding.narrowed:
            return hidden
        own = cluster == 0 or not self.tied
        projection = (self.out_projs if own else embedding.emb_projs)[cluster]
        return F.linear(hidden, projection.t())


def _table(size: int, width: int) -> nn.Embedding:
    device = torch.get_default_device()
    return nn.utils.skip_init(nn.Embedding, size, width, device=device)
