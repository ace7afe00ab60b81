"""A trained model on a whole split, each document scored exactly once."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from rlt_dist.data.corpus.index import SplitIndex, load_corpus
from rlt_dist.data.stream.corpora import remote_options
from rlt_dist.data.stream.documents import plan_lanes
from rlt_dist.data.stream.lanes import Run
from rlt_dist.data.stream.loader import Batch, LaneLoader
from rlt_dist.data.stream.mixture import Share
from rlt_dist.data.stream.reading import Reading
from rlt_dist.inference.evaluate import Evaluation, WholeScorer, evaluate, to_evaluation
from rlt_dist.inference.load import Trained
from rlt_dist.util.errors import UserError

Watch = Callable[[int, int], None]
"""Called with the tokens read so far and those there are to read."""


@dataclass(frozen=True)
class HeldOut:
    """How a split is read.

    Attributes:
        corpus: folder or address of the corpus.
        segment: tokens of a lane per forward.
        lanes: streams side by side; fewer where the split has fewer documents.
        max_tokens: where to stop, counted over all lanes; None: at the end.
        carried: whether state is carried from segment to segment.
    """

    corpus: str
    split: str
    segment: int
    lanes: int
    max_tokens: int | None
    carried: bool


def evaluate_split(trained: Trained, wanted: HeldOut, watch: Watch) -> Evaluation:
    """Score a split with a trained model.

    Raises:
        UserError: the corpus was made by another tokenizer, or has no such split.
    """
    corpus = load_corpus(wanted.corpus, remote_options(trained.config.data.remote))
    if corpus.tokenizer.hash != trained.tokenizer.hash:
        raise UserError(
            f"{wanted.corpus}: was made by another tokenizer than {trained.run_folder}'s; "
            "prepare it again with --tokenizer of that run"
        )
    device = next(trained.model.parameters()).device
    lengths = torch.from_numpy(trained.tokenizer.byte_lengths()) * trained.tokenizer.lossless
    batches = (
        batch.to(device)
        for batch in _batches_once(corpus.split(wanted.split), trained, wanted, watch)
    )
    scorer = WholeScorer(trained.model, trained.config)
    sums = evaluate(scorer, batches, lengths.to(device), carried=wanted.carried)
    return to_evaluation(sums)


def _batches_once(
    split: SplitIndex, trained: Trained, wanted: HeldOut, watch: Watch
) -> Iterator[Batch]:
    """Batches until every lane has read its run of epoch 0.

    A lane that is done goes on reading with its tokens masked until the longest lane is done.
    """
    lanes, seed = min(wanted.lanes, split.documents), trained.config.train.seed
    plan = plan_lanes(split, lanes, seed)
    left = torch.tensor([_tokens_of(split, plan.run(0, lane)) for lane in range(lanes)])
    if wanted.max_tokens is not None:
        left = left.clamp(max=max(1, wanted.max_tokens // lanes))
    total = int(left.sum())
    max_document = trained.config.data.max_document
    reading = Reading((Share(split, 1),), lanes, wanted.segment, seed, max_document)
    loader = LaneLoader(reading, range(lanes))
    while bool((left > 0).any()):
        batch = loader.next()
        index = torch.arange(wanted.segment)
        yield replace(batch, loss_mask=batch.loss_mask & (index < left[:, None]))
        left -= wanted.segment
        watch(total - int(left.clamp(min=0).sum()), total)


def _tokens_of(split: SplitIndex, run: Run) -> int:
    """Tokens of a lane's run."""
    parts = (
        split.shards[span.shard].sidecar()["tokens"][span.first : span.last] for span in run.spans
    )
    return int(sum(part.sum() for part in parts))
