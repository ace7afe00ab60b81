"""From a configuration to a model."""

import torch

from rlt_dist.config.model import GruConfig, ModelConfig, RltConfig
from rlt_dist.models.gru import GatedRecurrentUnits
from rlt_dist.models.initial import initialise
from rlt_dist.models.rlt.model import RecurrentLoopedTransformer
from rlt_dist.models.transformer_xl.model import FrozenTransformerXL, TransformerXL
from rlt_dist.ops.recurrence.dispatch import DEFAULT, Recurrence

Model = RecurrentLoopedTransformer | TransformerXL | GatedRecurrentUnits
"""All have forward (the composing function), logits, nll, loss (the sum of nll, for training),
empty_state, frozen and initial_distribution."""

Frozen = RecurrentLoopedTransformer | FrozenTransformerXL | GatedRecurrentUnits
"""What `frozen` of a model gives, to evaluate with while weights stand still: all have forward
without noise (by a call), logits, nll and empty_state."""


def build_model(
    config: ModelConfig,
    vocabulary: int,
    dtype: torch.dtype = torch.float32,
    recurrence: Recurrence = DEFAULT,
    recompute_layers: bool = False,
) -> Model:
    """The model on the default device, its parameters allocated and not yet filled.

    Args:
        recurrence: how the recurrent decoder is computed; it changes no result.
        recompute_layers: whether encoder layers, or Transformer-XL's, keep their inputs alone for
            backward; nor does that.
    """
    if isinstance(config, RltConfig):
        model = RecurrentLoopedTransformer(config, vocabulary, recurrence, recompute_layers)
        return model.to(dtype)
    if isinstance(config, GruConfig):
        return GatedRecurrentUnits(config, vocabulary).to(dtype)
    return TransformerXL(config, vocabulary, recompute_layers).to(dtype)


def initial_model(
    config: ModelConfig,
    vocabulary: int,
    seed: int,
    dtype: torch.dtype = torch.float32,
    recurrence: Recurrence = DEFAULT,
) -> Model:
    """The model with the initial values that `seed` names."""
    model = build_model(config, vocabulary, dtype, recurrence)
    initialise(model, seed, model.initial_distribution)
    return model
