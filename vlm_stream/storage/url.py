"""URLs of stores: taken apart and put together, the same way for every scheme.

Enters: strings. Leaves: strings. Nothing here opens, reads or checks that anything exists.
"""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from vlm_stream.errors import ConfigError

__all__ = ["check_path", "join_url", "local_path", "scheme_of", "split_url"]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")


def scheme_of(url: str) -> str:
    """Return the scheme in lower case, `file` for plain paths.

    >>> scheme_of("S3://bucket/data"), scheme_of("/data/set")
    ('s3', 'file')
    """
    match = _SCHEME.match(url)
    return match.group(1).lower() if match else "file"


def local_path(url: str) -> str:
    """Return the absolute path that a plain path or a `file://` URL names."""
    if _SCHEME.match(url):
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost"):
            raise ConfigError(
                f"{url} names the host '{parts.netloc}', so it cannot be read as a local file. "
                f"Write three slashes for a local path: file:///{parts.netloc}{parts.path}"
            )
        return str(Path(unquote(parts.path)).absolute())
    path = Path(url)
    return str(path if path.is_absolute() else path.expanduser().absolute())


def join_url(root: str, path: str) -> str:
    """Return the URL of `path` under `root`.

    >>> join_url("s3://bucket/data/", "shard-000000.tar")
    's3://bucket/data/shard-000000.tar'
    """
    if not path:
        return root
    return root + path if root.endswith("/") else f"{root}/{path}"


def split_url(url: str) -> tuple[str, str]:
    """Return the root and the last name of a URL: what `join_url` put together.

    >>> split_url("s3://bucket/data/dataset.json")
    ('s3://bucket/data', 'dataset.json')
    >>> split_url("dataset.json")
    ('.', 'dataset.json')
    """
    match = _SCHEME.match(url)
    begin = match.end() if match else 0
    head, slash, name = url[begin:].rpartition("/")
    if not name:
        raise ConfigError(f"'{url}' ends without a file name; give the URL of one file.")
    if match:
        if not slash and match.group(1).lower() != "file":
            raise ConfigError(f"'{url}' names a store and no file in it; add the path of the file.")
        return url[:begin] + (head or "/" * bool(slash)), name
    return head or ("/" if slash else "."), name


def check_path(root: str, path: str) -> str:
    """Return `path` when it is relative and stays under the root; raise `ConfigError` otherwise."""
    if not path or path.startswith("/") or ".." in path.split("/"):
        raise ConfigError(
            f"'{path}' is not a path under {root}: paths in a store are relative and have no '..'. "
            f"Open the store at the folder that holds the file."
        )
    return path
