"""Transformer-XL as its authors' code names it: a module tree with all that their state dict holds.

Written from the layout of kimiyoung/transformer-xl's `MemTransformerLM`: modules, parameters, ties
and buffers, in plain torch modules, so that it can be pickled whole. It computes nothing.
"""

import torch
from torch import nn

from rlt_dist.config.model import TransformerXLConfig


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


def _tree(**children: object) -> nn.Module:
    """A module with these modules, parameters and buffers."""
    module = nn.Module()
    for name, child in children.items():
        if isinstance(child, torch.Tensor) and not isinstance(child, nn.Parameter):
            module.register_buffer(name, child)
        else:
            setattr(module, name, child)
    return module


def _layer(config: TransformerXLConfig) -> nn.Module:
    d, inner = config.d_model, config.heads * config.head_width
    attention = _tree(
        qkv_net=nn.Linear(d, 3 * inner, bias=False),
        o_net=nn.Linear(inner, d, bias=False),
        layer_norm=nn.LayerNorm(d),
        r_net=nn.Linear(d, inner, bias=False),
    )
    steps = [nn.Linear(d, config.d_inner), nn.ReLU(), nn.Dropout()]
    core = nn.Sequential(*steps, nn.Linear(config.d_inner, d), nn.Dropout())
    return _tree(dec_attn=attention, pos_ff=_tree(CoreNet=core, layer_norm=nn.LayerNorm(d)))


def language_model(config: TransformerXLConfig, vocabulary: int) -> nn.Module:
    """`MemTransformerLM(...)`, with random values."""
    torch.manual_seed(3)
    d, tails = config.d_model, len(config.cutoffs)
    bounds = (0, *config.cutoffs, vocabulary)
    narrowed = config.div_val > 1
    widths = [d // config.div_val**i for i in range(tails + 1)]
    tables = [(bounds[i + 1] - bounds[i], widths[i]) for i in range(tails + 1)]
    tables = tables if narrowed else [(vocabulary, d)]
    projections = [(d, width) for width in widths] if narrowed else []
    embeddings = nn.ModuleList(nn.Embedding(*table) for table in tables)
    projected = nn.ParameterList(_parameter(*shape) for shape in projections)
    outputs = nn.ModuleList(nn.Linear(width, size) for size, width in tables)
    own = nn.ParameterList(_parameter(*shape) for shape in projections)
    for output, embedding in zip(outputs, embeddings, strict=True):
        output.weight = embedding.weight
    for i in range(1, len(own)):
        if config.tie_projections:
            own[i] = projected[i]
    clusters = {"cluster_weight": _parameter(tails, d), "cluster_bias": _parameter(tails)}
    return _tree(
        word_emb=_tree(emb_layers=embeddings, emb_projs=projected),
        layers=nn.ModuleList(_layer(config) for _ in range(config.layers)),
        crit=_tree(out_layers=outputs, out_projs=own, **(clusters if tails else {})),
        pos_emb=_tree(inv_freq=1 / 10000 ** (torch.arange(0.0, d, 2.0) / d)),
        r_w_bias=_parameter(config.heads, config.head_width),
        r_r_bias=_parameter(config.heads, config.head_width),
    )
