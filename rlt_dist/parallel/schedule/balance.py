"""Which layers sit on which stage."""

from rlt_dist.util.errors import UserError


def balance(layers: int, stages: int, name: str = "layers") -> tuple[range, ...]:
    """Cut a stack of layers over stages as evenly as it goes: counts differ by one at most.

    The stages in the middle get what is left over, since the first holds the embedding and the last
    the head: 10 layers on 4 stages are 2, 3, 3, 2. Encoder and decoder are cut one by one; where
    they are tied they have as many layers, so layer i of both sits on the same stage.

    Args:
        name: of the stack, for the error.

    Returns:
        by stage, its layers' numbers.

    Raises:
        UserError: there are more stages than layers.
    """
    if stages > layers:
        raise UserError(
            f"{layers} {name} cannot be cut over {stages} pipeline stages; "
            f"set mesh.pipeline to {layers} or less"
        )
    each, over = divmod(layers, stages)
    first_larger = (stages - over) // 2
    counts = [each + (first_larger <= stage < first_larger + over) for stage in range(stages)]
    return tuple(range(sum(counts[:stage]), sum(counts[: stage + 1])) for stage in range(stages))
