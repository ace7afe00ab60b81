"""Where weights may be cut over processes.

Heads, inner columns of a feed-forward and rows of a vocabulary are computed apart from one another,
and what they give is added up. So a sublayer can be run by several processes, each with some of
them: its input enters a region in which every process has weights of its own, and what leaves the
region is the sum (Shoeybi et al., "Megatron-LM", arXiv 1909.08053). Models and ops mark these two
places and know no more of it; `parallel` puts a seam there that knows the processes.
"""

from torch import Tensor


class Seam:
    """The seam of whole weights: one process has all, nothing needs adding up."""

    def own(self, size: int) -> range:
        """Which of `size` heads, columns or rows are here."""
        return range(size)

    def enter(self, x: Tensor) -> Tensor:
        """x into the region; its gradient is the sum of what all processes found.

        What stands before it is alike on all processes and so gets a whole gradient. A weight
        behind it that is not cut (a norm's) gets this process's part of its gradient only.
        """
        return x

    def leave(self, x: Tensor) -> Tensor:
        """The sum of all processes' x; its gradient is handed to each of them as it is."""
        return x

    def total(self, x: Tensor) -> Tensor:
        """The sum of all processes' x, without autograd."""
        return x

    def largest(self, x: Tensor) -> Tensor:
        """The element-wise maximum of all processes' x, without autograd."""
        return x


WHOLE = Seam()
