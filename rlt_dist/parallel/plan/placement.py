"""Which pieces sit on which stage."""

from dataclasses import dataclass

from rlt_dist.config.model import ModelConfig, RltConfig, one_piece
from rlt_dist.parallel.schedule.balance import balance
from rlt_dist.util.errors import UserError


@dataclass(frozen=True)
class Placement:
    """One stage's share of a model.

    Attributes:
        stage, stages: which of how many.
        encoder, decoder: layers of the looped transformer, cut one by one.
        layers: layers of the others.
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
        UserError: a stack has fewer layers than there are stages, or the model has none.
    """
    piece = one_piece(config)
    if piece is not None and stages > 1:
        raise UserError(f"{piece} has no stages, and {stages} are asked for")
    if isinstance(config, RltConfig) and not config.decoder_layers:
        return (Placement(0, 1, encoder=range(config.encoder_layers)),)
    if isinstance(config, RltConfig):
        encoder = balance(config.encoder_layers, stages, "encoder_layers")
        decoder = balance(config.decoder_layers, stages, "decoder_layers")
        return tuple(
            Placement(stage, stages, encoder=e, decoder=d)
            for stage, (e, d) in enumerate(zip(encoder, decoder, strict=True))
        )
    layers = balance(config.layers, stages)
    return tuple(Placement(stage, stages, layers=own) for stage, own in enumerate(layers))
