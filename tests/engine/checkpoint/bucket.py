"""A store of objects, as a test sees it: files of a folder, without folders and without renames, and some trouble."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem


class Bucket(LocalFileSystem):
    """``bucket:///folder``: what is written appears when it is closed; there is no rename."""

    protocol = "bucket"
    writes_left: int | None = None
    """Objects that can still be written, by this process, before it dies."""
    silent = False
    """Whether it is asked in vain what it has."""

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if "w" in mode and Bucket.writes_left is not None:
            Bucket.writes_left -= 1
            if Bucket.writes_left < 0:
                raise ConnectionError("the store is gone")
        return super()._open(path, mode, **options)

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        """What it has of an object."""
        if Bucket.silent:
            raise ConnectionError("no answer")
        return super().info(path, **options)

    def ls(self, path: str, detail: bool = False, **options: Any) -> list[Any]:
        """What it has in a folder, which has an object too, as some tools make."""
        return super().ls(path, detail, **options) + ([] if detail else [f"{path}/"])

    def mv(self, *args: Any, **options: Any) -> None:
        """Not here."""
        raise NotImplementedError("objects are not renamed")

    mv_file = rename = move = mv


def address(folder: Path) -> str:
    """Of a folder, for this process and those that call it too."""
    fsspec.register_implementation("bucket", Bucket, clobber=True)
    return f"bucket://{folder}"
