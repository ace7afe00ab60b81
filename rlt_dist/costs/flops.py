"""FLOPs: of the model, which utilisation is measured by, and of what a mesh's ranks really do.

A product of [m, k] and [k, n] counts 2 m k n, everything else nothing, as in
torch.utils.flop_counter.FlopCounterMode; attention counts every key, seen or not, as that does and
as Chowdhery et al. ("PaLM", arXiv 2204.02311, appendix B) do for utilisation.

Model FLOPs are forward and backward by plain autograd (`ops.recurrence: reference`) without
anything formed twice. Executed FLOPs are those of the loops and of recomputation as configured:
more where things are formed again, less where a loop leaves out entries that no token of a step can
see. Fused attention always forms its scores again in backward; it is the model's only
recomputation.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from rlt_dist.config.model import GruConfig, ModelConfig, RltConfig
from rlt_dist.config.run import RunConfig
from rlt_dist.costs.effort import Product, Purpose, again, both_gradients, times
from rlt_dist.costs.head import softmax_products
from rlt_dist.costs.looped import (
    encoder_attention,
    encoder_layer,
    looped_share,
    memory,
    reference_decoder,
)
from rlt_dist.costs.recurrent import RecurrentRank
from rlt_dist.costs.run import Run
from rlt_dist.costs.sizes import Numbers, Pass, pass_of
from rlt_dist.costs.stack import embedding, layer_products, projections, softmaxes, stack_share
from rlt_dist.parallel.plan.placement import place
from rlt_dist.parallel.schedule.instructions import Kind

Flops = Mapping[Purpose, int]
"""By what products are formed for."""


def total(products: Iterable[Product]) -> Flops:
    """FLOPs of products, by purpose."""
    found: Counter[Purpose] = Counter()
    for product in products:
        found[product.purpose] += product.flops
    return found


def model_products(config: ModelConfig, vocabulary: int, own: Pass) -> dict[str, list[Product]]:
    """By piece, all products of a training step of some lanes on whole weights."""
    if isinstance(config, GruConfig):
        rank = RecurrentRank(config, vocabulary, own, Numbers(4, 4))
        return {"layers": [*rank.forward(), *rank.backward()], "head": rank.head()}
    (whole,) = place(config, 1)
    if isinstance(config, RltConfig):
        share = looped_share(config, vocabulary, whole)
        forward = {
            "encoder": list(times(share.encoder, encoder_layer(share, own))),
            "memory": memory(share, own),
            "decoder": reference_decoder(share, own),
            "head": softmax_products(own.scored, config.d_model, vocabulary),
        }
        found = {piece: [*made, *both_gradients(made)] for piece, made in forward.items()}
        scores = times(share.encoder, encoder_attention(share, own)[:1])
        found["encoder"] += again(scores)
        return found
    stack = stack_share(config, vocabulary, whole)
    layer, embedded = layer_products(stack, own), embedding(stack, own)
    head = [*projections(stack, own), *softmaxes(stack, own)]
    return {
        "embedding": [*embedded, *both_gradients(embedded)],
        "layers": list(times(stack.layers, [*layer.all, *layer.backward(config.pre_norm)])),
        "head": [*head, *both_gradients(head)],
    }


def model_flops(config: ModelConfig, vocabulary: int, own: Pass) -> dict[str, Flops]:
    """By piece, FLOPs of a training step of some lanes; `AGAIN` is no part of utilisation."""
    return {piece: total(made) for piece, made in model_products(config, vocabulary, own).items()}


def flops_per_token(config: RunConfig, vocabulary: int) -> float:
    """Model FLOPs of a run's token: forward and backward, nothing that is formed again.

    States are full, and lanes at the same place: what shorter chunks leave empty is no work.
    """
    own = pass_of(config, vocabulary, config.data.lanes)
    pieces = model_flops(config.bounded_model, vocabulary, own).values()
    useful = sum(
        flops for of in pieces for purpose, flops in of.items() if purpose != Purpose.AGAIN
    )
    return useful / own.rows


def utilisation(flops_of_token: float, tokens_per_second: float, peak: float) -> float:
    """MFU: model FLOPs done in a second over those that could be done.

    Args:
        peak: FLOP/s of all devices together.
    """
    return flops_of_token * tokens_per_second / peak


def rank_flops(run: Run, stage: int, tensor: int) -> dict[Kind, Flops]:
    """Executed FLOPs of a rank in one optimizer step, by kind of work.

    The reference backend, which runs on one stage only, keeps everything and forms nothing again;
    its decoder's are given by `model_flops`.
    """
    rank, found = run.rank(stage, tensor), defaultdict[Kind, Counter[Purpose]](Counter)
    for work, count in rank.alike():
        for purpose, flops in total(rank.effort(work).products).items():
            found[work.kind][purpose] += flops * count * run.micro_batches
    return dict(found)


def executed_flops(run: Run) -> Flops:
    """Executed FLOPs of all ranks in one optimizer step."""
    found: Counter[Purpose] = Counter()
    for stage in range(run.axes.pipeline):
        for tensor in range(run.axes.tensor):
            for flops in rank_flops(run, stage, tensor).values():
                found.update(flops)
    return {purpose: flops * run.axes.data for purpose, flops in found.items()}
