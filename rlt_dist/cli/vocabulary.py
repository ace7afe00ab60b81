"""How many ids a configuration's corpus has."""

from typing import TYPE_CHECKING

from rlt_dist.util.errors import UserError

if TYPE_CHECKING:
    from rlt_dist.config.data import DataConfig


def vocabulary_of(data: "DataConfig") -> int:
    """Raises UserError where there is no corpus to ask."""
    from rlt_dist.data.corpus.index import read_content
    from rlt_dist.data.corpus.location import open_storage

    try:
        return read_content(open_storage(data.corpora[0].path)).tokenizer.vocabulary
    except UserError as error:
        raise UserError(f"{error}; or give --vocabulary") from None
