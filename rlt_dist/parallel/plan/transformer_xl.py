"""The plan of Transformer-XL."""

import re

from rlt_dist.config.model import TransformerXLConfig
from rlt_dist.models.transformer_xl.adaptive import Clusters
from rlt_dist.models.transformer_xl.model import TransformerXL
from rlt_dist.parallel.plan.cut import Cut
from rlt_dist.parallel.plan.placement import Placement


class TransformerXLPlan:
    """What `parallel.plan.layout` asks of a model's plan."""

    def __init__(self, config: TransformerXLConfig, vocabulary: int) -> None:
        width = config.head_width
        heads, inner = config.heads * width, config.d_inner
        clusters = Clusters(config.cutoffs, vocabulary)
        sizes = tuple(clusters.size(i) for i in range(clusters.tails + 1))
        self._cuts = [
            (r"dec_attn\.qkv_net\.weight", Cut(0, (heads,) * 3, width)),
            (r"dec_attn\.r_net\.weight", Cut(0, (heads,), width)),
            (r"dec_attn\.o_net\.weight", Cut(1, (heads,), width)),
            (r"CoreNet\.0\.(weight|bias)", Cut(0, (inner,))),
            (r"CoreNet\.3\.weight", Cut(1, (inner,))),
            (r"r_[wr]_bias", Cut(0, (config.heads,))),
        ]
        tables = [(size,) for size in sizes] if config.div_val > 1 else [sizes]
        self._cuts += [
            (rf"(emb_layers\.{i}\.weight|out_layers\.{i}\.bias)", Cut(0, rows))
            for i, rows in enumerate(tables)
        ]

    def cut(self, name: str) -> Cut | None:
        """How a parameter is cut; None: every process of the tensor axis has the whole."""
        found = (cut for pattern, cut in self._cuts if re.search(rf"(^|\.){pattern}$", name))
        return next(found, None)

    def partial(self, name: str) -> bool:
        """Whether an uncut parameter's gradient on one process is but a part of it.

        The projections of the adaptive softmax stand behind the entry into the region where each
        process has rows of its own, those of the embedding before its end.
        """
        return "_projs." in name or name.startswith("crit.cluster_")

    def state_cut(self, _name: str) -> Cut | None:
        """How a tensor of the state is cut, its lanes aside: memories hold whole inputs."""
        return None

    def keep(self, model: TransformerXL, placement: Placement) -> None:
        """Take away what is not on a stage; all stages have u and v."""
        for number in list(model.layers):
            if int(number) not in placement.layers:
                del model.layers[number]
        if not placement.last:
            model.crit = None
        # The head's tables, and the projections of its tails, are the embedding's.
        if not (placement.first or placement.last):
            model.word_emb = None
