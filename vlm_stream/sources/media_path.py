"""Where a medium lies: relative names are joined to a folder or a URL, everything else stays as written."""

from __future__ import annotations

import posixpath
from pathlib import Path

__all__ = ["absolute", "is_url", "join_media_path", "parent_of"]


def is_url(path: str) -> bool:
    """Tell whether the path names its own store or carries its own bytes (`s3://...`, `file:///...`, `data:...`)."""
    return "://" in path or path.startswith("data:")


def join_media_path(media_dir: str | None, path: str) -> str:
    """Return the path below `media_dir` when it is relative; LMDB entries (`env::key`) are paths like any other.

    >>> join_media_path("s3://bucket/coco", "a/1.jpg")
    's3://bucket/coco/a/1.jpg'
    """
    if not media_dir or is_url(path) or posixpath.isabs(path):
        return path
    return posixpath.join(media_dir, path)


def parent_of(path: str) -> str:
    """Return the folder or URL that holds the file; "" is the working directory."""
    return path.rpartition("/")[0] if is_url(path) else posixpath.dirname(path)


def absolute(path: str) -> str:
    """Return a path that means the same from any working directory, as other processes may have another."""
    return path if is_url(path) else str(Path(path).absolute())
