"""Paths of files on a disk, and fsspec URLs of objects in a store (``s3://``, ``gs://``, ``hf://``, ...)."""

from __future__ import annotations

from pathlib import Path

from fsspec import available_protocols
from upath import UPath

from shoal.base.errors import UsageError

AnyPath = Path | UPath
"""Path on a disk, or URL of an object."""


def to_path(address: str | Path, option: str = "checkpoint.folder") -> AnyPath:
    """Return the path, or a `UPath` for an address with a protocol, such as ``s3://bucket/run``.

    Raises:
        UsageError: the protocol is unknown, or its package is missing.
    """
    if "://" not in str(address):
        return Path(address)
    try:
        folder = UPath(str(address).rstrip("/"))
        folder.fs  # noqa: B018  # connects
    except (ImportError, ValueError) as error:
        raise UsageError(
            f"{option} = '{address}': {error}.\n  Install the fsspec package for "
            f"{str(address).split('://')[0]}://, or use one of {', '.join(sorted(available_protocols()))}."
        ) from None
    return folder
