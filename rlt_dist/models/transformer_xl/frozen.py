"""What Transformer-XL derives from its weights alone, kept while they stand still."""

from collections.abc import Callable, Hashable, Iterable

from torch import Tensor


class Derived:
    """W_R R of every layer, for as long as the weights stand still.

    Made for a reach, it serves all shorter ones.
    """

    def __init__(self) -> None:
        self._made: list[Tensor] = []
        self._source: Hashable = None

    def projected(
        self, count: int, project: Callable[[int], list[Tensor]], source: Hashable
    ) -> list[Tensor]:
        """Of each layer, [count, H * d_head], for distances count - 1 .. 0.

        Args:
            project: makes them anew for a count.
            source: all that they depend on but the count and the weights.
        """
        longest = len(self._made[0]) if source == self._source else 0
        if longest < count:
            # A memory that fills token by token would ask for a little more each time.
            longest = max(count, 2 * longest)
            self._made, self._source = project(longest), source
        return [made[longest - count :] for made in self._made]


class Guard:
    """Notices weights that moved by a step, a load or a conversion: an honest mistake.

    What leaves no mark on a tensor is not noticed: a write through `.data` or NumPy, a parameter
    replaced by another, any write to a model that was made in inference mode.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self._weights = list(weights)
        self._marks = self._now()

    def check(self) -> None:
        """Raises RuntimeError where a weight has moved."""
        if self._now() != self._marks:
            raise RuntimeError(
                "weights have changed since frozen() was called, so what it keeps and its states "
                "are out of date; call frozen() again and begin with an empty state"
            )

    def _now(self) -> list[tuple[int, int]]:
        # Tensors made in inference mode count no versions.
        return [(w.data_ptr(), 0 if w.is_inference() else w._version) for w in self._weights]
