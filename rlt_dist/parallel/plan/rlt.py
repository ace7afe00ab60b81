"""The plan of the Recurrent Looped Transformer."""

import re

from rlt_dist.config.model import RltConfig
from rlt_dist.models.rlt.model import RecurrentLoopedTransformer
from rlt_dist.parallel.plan.cut import Cut
from rlt_dist.parallel.plan.placement import Placement


class RltPlan:
    """What `parallel.plan.layout` asks of a model's plan, for every model of kind rlt."""

    def __init__(self, config: RltConfig, vocabulary: int) -> None:
        d, width = config.d_model, config.head_width
        heads, kv = config.heads * width, config.key_value_heads * width
        self._config = config
        self._cuts = (
            (r"(attn|cross)\.q\.weight", Cut(0, (heads,), width)),
            (r"(attn|memory\.\d+)\.[kv]\.weight", Cut(0, (kv,), width, copied=True)),
            (r"(attn|cross)\.o\.weight", Cut(1, (heads,), width)),
            (r"ffn\.(gate|up)\.weight", Cut(0, (config.ffn,))),
            (r"ffn\.down\.weight", Cut(1, (config.ffn,))),
            (r"merge\.(gate|state)\.(weight|bias)", Cut(0, (d,))),
            (r"(embed|output)\.weight", Cut(0, (vocabulary,))),
        )
        self._kv_heads = Cut(2, (config.key_value_heads,), copied=True)

    def cut(self, name: str) -> Cut | None:
        """How a parameter is cut; None: every process of the tensor axis has the whole."""
        found = (cut for pattern, cut in self._cuts if re.search(rf"(^|\.){pattern}$", name))
        return next(found, None)

    def partial(self, name: str) -> bool:
        """Whether an uncut parameter's gradient on one process is but a part of it.

        All norms stand behind the entry into a region where each process has its own heads,
        columns or rows; s*, which starts a document before that, has its whole gradient everywhere.
        """
        return name.endswith("norm.weight")

    def state_cut(self, name: str) -> Cut | None:
        """How a tensor of the state is cut, its lanes aside: cached keys and values by head."""
        return self._kv_heads if name.endswith((".k", ".v")) else None

    def keep(self, model: RecurrentLoopedTransformer, placement: Placement) -> None:
        """Take away what is not on a stage.

        Every stage projects the memory that its decoder layers read. Tied layers have the same
        number in both stacks, hence the same stage.
        """
        config = self._config
        for stack, here in ((model.encoder, placement.encoder), (model.decoder, placement.decoder)):
            for number in list(stack):
                if int(number) not in here:
                    del stack[number]
        read = {config.memory_group(j) for j in placement.decoder}
        if model.memory is not None:
            for group in model.memory.groups().keys() - read:
                delattr(model.memory, str(group))
        if not placement.first:
            model.merge = None
        if not placement.last:
            model.output = model.output_norm = None
        if not (placement.first or (placement.last and config.tie_output)):
            model.embed = None
