"""How torch.distributed.checkpoint is told what a process has of each tensor.

torch's DTensor says how a tensor is cut by dimension and mesh axis, and every part must be what
`torch.chunk` gives. That has no word for the q, k and v of a fused weight, each cut by itself, nor
for key/value heads that several processes hold. So blocks are named here by their offsets in the
whole, which is how a checkpoint stores a DTensor too: any other way of cutting reads them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

Ranges = Sequence[range]
"""Which indices of a whole dimension a process has, in its own order."""


@dataclass(frozen=True)
class Pieces:
    """What one process has of a tensor.

    Attributes:
        whole: shape of the whole.
        blocks: views of what is here, by their offsets in the whole.
    """

    whole: torch.Size
    blocks: dict[torch.Size, Tensor]

    @property
    def chunks(self) -> list[ChunkStorageMetadata]:
        """The same, for torch."""
        return [ChunkStorageMetadata(where, block.shape) for where, block in self.blocks.items()]

    def write_items(self, name: str) -> Iterable[WriteItem]:
        """What to write; of what several processes have, torch writes one."""
        for chunk in self.chunks:
            properties = TensorProperties.create_from_tensor(self.blocks[chunk.offsets])
            yield WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.whole),
            )


def pieces(local: Tensor, whole: Sequence[int], cuts: Mapping[int, Ranges]) -> Pieces:
    """Say where a process's part of a tensor lies.

    Args:
        local: what it has.
        cuts: by dimension, the ranges that it has; of a dimension that is not named, all.
    """
    blocks = {}
    for places in product(*(_starts(cuts.get(d, [range(size)])) for d, size in enumerate(whole))):
        block = local
        for dim, (first, here) in enumerate(places):
            block = block.narrow(dim, first, len(here))
        if block.numel():
            blocks[torch.Size(here.start for _, here in places)] = block
    return Pieces(torch.Size(whole), blocks)


def local_shape(whole: Sequence[int], cuts: Mapping[int, Ranges]) -> list[int]:
    """The shape of what a process has of a tensor."""
    return [sum(map(len, cuts.get(dim, [range(size)]))) for dim, size in enumerate(whole)]


def clip(ranges: Ranges, part: range) -> Ranges:
    """Those of the indices in `ranges` that stand at the places `part` among them."""
    return [
        here[max(0, part.start - first) : max(0, part.stop - first)]
        for first, here in _starts(ranges)
    ]


def _starts(ranges: Ranges) -> list[tuple[int, range]]:
    """Each range and how many indices stand before it."""
    starts, first = [], 0
    for here in ranges:
        starts.append((first, here))
        first += len(here)
    return starts


class PiecesSaver(DefaultSavePlanner):
    """Plans the writing of a mapping of names to pieces."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        named: dict[str, Pieces] = self.state_dict
        self.plan = SavePlan([i for name, of in named.items() for i in of.write_items(name)])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn].blocks[index.offset]


class PiecesLoader(DefaultLoadPlanner):
    """Plans the reading into a mapping of names to pieces."""

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        # torch's own empties what is neither a tensor nor a number.
        self.state_dict, self.metadata = state_dict, metadata
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items = []
        for name, of in self.state_dict.items():
            stored = self.metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(name, stored, of.chunks)
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].blocks[index.offset]
