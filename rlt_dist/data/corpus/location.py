"""From a path or an address to the storage that reads it."""

from pathlib import Path

from rlt_dist.data.corpus.remote import RemoteFolder
from rlt_dist.data.corpus.storage import DEFAULT_OPTIONS, LocalFolder, RemoteOptions, Storage


def open_storage(location: str | Path, remote: RemoteOptions = DEFAULT_OPTIONS) -> Storage:
    """The folder at a path, a `file://` address, or any address that fsspec understands.

    Raises:
        UserError: the address's protocol is unknown, or its package is not installed.
    """
    protocol, separator, path = str(location).partition("://")
    if not separator:
        return LocalFolder(Path(location))
    if protocol == "file":
        return LocalFolder(Path(path))
    return RemoteFolder(str(location), remote)
