"""Adaptive input and softmax: frequent ids get wide vectors and a short softmax, rare ones less.

Grave et al., "Efficient softmax approximation for GPUs", ICML 2017, in the form of the
Transformer-XL authors (Dai et al., ACL 2019), whose parameter names these modules carry. Ids must
be ranked by frequency. They fall into clusters: cluster 0 is the head, clusters 1 .. N the tails;
without cutoffs there is the head alone, a plain embedding and softmax.

Processes that share a vocabulary cut each cluster by itself, `seam.own` of its ids, so that all
have their part of the frequent ones: of a table or bias that holds several clusters, a process has
its part of each, one behind the other. Projections, `cluster_weight` and `cluster_bias` are not
cut, but stand between the two places of the seam: their gradients are partial, and their sum over
the processes is the whole one.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlt_dist.config.model import TransformerXLConfig
from rlt_dist.models.modules import unfilled
from rlt_dist.ops.cross_entropy import linear_cross_entropy, linear_logits, linear_nll
from rlt_dist.ops.embedding import check_ids, inside, rows_of
from rlt_dist.ops.seam import WHOLE, Seam
from rlt_dist.util.errors import UserError

_Softmax = tuple[Tensor, Tensor, Tensor, Tensor, Seam]
"""hidden [n, width], weight [V, width], bias [V], targets int64 [n] of a linear softmax, and where
its vocabulary is cut."""


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

    def own(self, seam: Seam) -> list[range]:
        """The ids of each cluster that are here."""
        parts = [seam.own(self.size(cluster)) for cluster in range(self.tails + 1)]
        firsts = self.bounds[:-1]
        return [
            range(first + part.start, first + part.stop)
            for first, part in zip(firsts, parts, strict=True)
        ]

    def split(self, tensors: Sequence[Tensor], seam: Seam) -> Sequence[Tensor]:
        """A tensor for each cluster, [its ids here, ...], given these or one of all ids here.

        The backward of a split joins the gradients in one copy; that of a slice would fill an
        array of the whole's size for every cluster.
        """
        if len(tensors) > self.tails:
            return tensors
        return tensors[0].split([len(ids) for ids in self.own(seam)])

    def of(self, ids: Tensor) -> Tensor:
        """The cluster, int64, of each id."""
        cluster = torch.zeros_like(ids)
        for cutoff in self.bounds[1:-1]:
            cluster = cluster + (ids >= cutoff)
        return cluster


class AdaptiveEmbedding(nn.Module):
    """P_i E_i[id - cutoff] sqrt(d): a table of width d / div_val^i per cluster, projected to d.

    With div_val 1 there is one table of width d, and no projections. Where the tables are cut, an
    id is looked up by the process that has it; it is 0 for the others, and leaves as the sum.
    """

    seam: Seam = WHOLE

    def __init__(self, config: TransformerXLConfig, clusters: Clusters) -> None:
        super().__init__()
        d, self.clusters, self.narrowed = config.d_model, clusters, config.div_val > 1
        widths = [d // config.div_val**i for i in range(clusters.tails + 1)]
        sizes = [clusters.size(i) for i in range(clusters.tails + 1)]
        tables = zip(sizes, widths, strict=True) if self.narrowed else [(clusters.bounds[-1], d)]
        self.emb_layers = nn.ModuleList(
            unfilled(nn.Embedding, size, width) for size, width in tables
        )
        self.emb_projs = nn.ParameterList(
            [torch.empty(d, width) for width in widths] if self.narrowed else []
        )
        self.scale = d**0.5

    def tables(self) -> Sequence[Tensor]:
        """E_i, [ids of the cluster, width], by cluster."""
        tables = [layer.get_parameter("weight") for layer in self.emb_layers]
        return self.clusters.split(tables, self.seam)

    def forward(self, tokens: Tensor) -> Tensor:
        """Ids int64 [b, T] to [b, T, d] in the parameters' dtype.

        Raises:
            IndexError: an id is not in the vocabulary.
        """
        if self.seam is WHOLE and not self.narrowed:
            return self.emb_layers[0](tokens) * self.scale
        check_ids(tokens, self.clusters.bounds[-1])
        x = self._narrow(tokens) if self.narrowed else self._wide(tokens)
        return self.seam.leave(x) * self.scale

    def _narrow(self, tokens: Tensor) -> Tensor:
        """From a table for each cluster, projected.

        Every cluster projects every token and keeps its own. Later clusters are narrow, so this
        costs little, and no shape, hence no last bit, depends on the tokens around a token.
        """
        x = self.emb_projs[0].new_zeros(())
        tables = zip(self.clusters.own(self.seam), self.tables(), self.emb_projs, strict=True)
        for ids, table, projection in tables:
            here = inside(tokens, ids)
            found = rows_of(table, (tokens - ids.start).masked_fill(~here, 0))
            # Autocast would leave the residual stream and the memory in bfloat16.
            projected = F.linear(found, projection).to(projection.dtype)
            x = torch.where(here[..., None], projected, x)
        return x

    def _wide(self, tokens: Tensor) -> Tensor:
        """From one table, which holds a part of each cluster."""
        table = self.emb_layers.get_parameter("0.weight")
        row, first = torch.full_like(tokens, -1), 0
        for ids in self.clusters.own(self.seam):
            row = torch.where(inside(tokens, ids), tokens - ids.start + first, row)
            first += len(ids)
        return rows_of(table, row.clamp(min=0)).masked_fill(row[..., None] < 0, 0)


class TiedOutput(nn.Module):
    """An output layer's own bias; its weight is the embedding's table."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(size))


class AdaptiveSoftmax(nn.Module):
    """One softmax over the head's words and N cluster logits, and one within each tail.

    Weights, and the projections of the tails where they are tied, are the embedding's, which every
    method is given: the head of a model may stand on another pipeline stage than its embedding.
    Where they are cut, the cluster logits follow the words of the process that has the first.
    """

    seam: Seam = WHOLE

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
        """log p of every id, [..., V], for hidden [..., d].

        Raises:
            RuntimeError: the vocabulary is cut: only `nll` and `loss` need no whole weights.
        """
        head = self.head_logits(hidden, embedding).log_softmax(dim=-1)
        parts = [head[..., : self.clusters.bounds[1]]]
        for i, layer in enumerate(self._layers(embedding)[1:], start=1):
            projected = self._project(hidden, embedding, i)
            tail = linear_logits(projected, *layer).log_softmax(dim=-1)
            parts.append(head[..., self.clusters.head_columns - i, None] + tail)
        return torch.cat(parts, dim=-1)

    def head_logits(self, hidden: Tensor, embedding: AdaptiveEmbedding) -> Tensor:
        """Logits of [the head's words ; N clusters], [..., c_0 + N], float32 or wider.

        Raises:
            RuntimeError: as `log_probabilities`.
        """
        if self.seam is not WHOLE:
            raise RuntimeError(
                "logits of all ids are formed from whole weights only; take nll or loss here, or "
                "a model whose vocabulary is not cut"
            )
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
        hidden, seam = self.seam.enter(hidden), self.seam
        cluster, layers = self.clusters.of(targets), self._layers(embedding)
        words, *others = self.clusters.own(seam)
        every = torch.arange(len(targets), device=targets.device)
        (weight, bias), column = layers[0], targets - words.start
        if tails := self.clusters.tails:
            # A word behind those here would have the number of a cluster's logit.
            column = column.masked_fill(column >= len(words), -1)
            column = torch.where(cluster == 0, column, len(words) + tails - cluster)
            logits = tails if 0 in words else 0
            # Copying the table costs less than copying the logits of many tokens.
            weight = torch.cat((weight, self.cluster_weight[:logits]))
            bias = torch.cat((bias, self.cluster_bias[:logits]))
        yield every, (self._project(hidden, embedding, 0), weight, bias, column, seam)
        for i, ids in enumerate(others, start=1):
            rows = (cluster == i).nonzero()[:, 0]
            local = targets[rows] - ids.start
            yield rows, (self._project(hidden[rows], embedding, i), *layers[i], local, seam)

    def _layers(self, embedding: AdaptiveEmbedding) -> list[tuple[Tensor, Tensor]]:
        """E_i, [ids of the cluster, width], and the bias of the words of every cluster."""
        biases = [layer.get_parameter("bias") for layer in self.out_layers]
        parts = self.clusters.split(biases, self.seam)
        return list(zip(embedding.tables(), parts, strict=True))

    def _project(self, hidden: Tensor, embedding: AdaptiveEmbedding, cluster: int) -> Tensor:
        """h P_i; h itself where nothing is narrowed."""
        if not embedding.narrowed:
            return hidden
        own = cluster == 0 or not self.tied
        projection = (self.out_projs if own else embedding.emb_projs)[cluster]
        return F.linear(hidden, projection.t())
