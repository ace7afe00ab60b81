"""Which pieces sit on which stage."""

from dataclasses import dataclass

from rlt_dist.config.model import ModelConfig, RltConfig
from rlt_dist.parallel.schedule.balance import balance


@dataclass(frozen=True)
class Placement:
    """One stage's share of a model.

    Attributes:
        stage, stages: which of how many.
        encoder, decoder: layers of the looped transformer, cut one by one.
        layers: layers of Transformer-XL.
    """

    stage: int
    stages: int
    encoder: range = range(0)
    decoder: range = range(0)
    layers: range = range(0)

    @property
    def first(self) -> bool:
        """It has the embedding, and the merge."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """It has the head."""
        return self.stage == self.stages - 1


def place(config: ModelConfig, stages: int) -> tuple[Placement, ...]:
    """Every stage's share.

    Raises:
        UserError: a stack has fewer layers than there are stages.
    """
    if isinstance(config, RltConfig):
        encoder = balance(config.encoder_layers, stages, "encoder_layers")
        decoder = balance(config.decoder_layers, stages, "decoder_layers")
        return tuple(
            Placement(stage, stages, encoder=e, decoder=d)
            for stage, (e, d) in enumerate(zip(encoder, decoder, strict=True))
        )
    layers = balance(config.layers, stages)
    return tuple(Placement(stage, stages, layers=own) for stage, own in enumerate(layers))
