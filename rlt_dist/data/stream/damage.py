"""What is done about a shard that cannot be read: the run ends, or the shard is skipped."""

from dataclasses import dataclass, field

from rlt_dist.data.corpus.storage import BadShard


@dataclass
class Damage:
    """Met by lanes that read.

    Attributes:
        skip: go on after the rest of what was to be read of a damaged shard.
        documents: how many were skipped since they were last taken.
        notices: one line for each time, likewise.
    """

    skip: bool = False
    documents: int = 0
    notices: list[str] = field(default_factory=list)

    def meet(self, error: BadShard, documents: int) -> None:
        """A shard failed with `documents` documents still to be read of it.

        Raises:
            BadShard: `error` itself, unless damage is to be skipped.
        """
        if not self.skip:
            raise error
        self.documents += documents
        self.notices.append(f"skipped {documents} documents: {error}")

    def take(self) -> tuple[int, tuple[str, ...]]:
        """Documents skipped and notices since the last call."""
        found = self.documents, tuple(self.notices)
        self.documents, self.notices = 0, []
        return found
