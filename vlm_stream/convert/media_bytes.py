"""Where a record's media come from: a path, a URL, an LMDB entry or bytes become bytes.

Enters: what a media item names. Leaves: its bytes, or `BadSampleError` with a reason to count by; or just its size, for
planning. What the bytes mean is not known here.
"""

from __future__ import annotations

import base64
import binascii
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote_to_bytes

from vlm_stream.errors import AccessError, BadSampleError, ConfigError, NotFoundError, StorageError
from vlm_stream.media import LMDB_SEPARATOR, read_lmdb

if TYPE_CHECKING:
    from vlm_stream.storage import Store, StoreOptions

__all__ = ["MediaReader"]

_READ_BYTES: Final = 1 << 24


@dataclass(slots=True)
class MediaReader:
    """Reads media for one worker; keeps the stores it has opened."""

    confine: bool = False
    """Refuse local files and URLs outside of the record's media folder, symbolic links resolved."""
    options: StoreOptions | None = None
    _stores: dict[str, Store] = field(default_factory=dict)

    def read(self, where: Any, root: str | None) -> bytes:
        """Return the medium's bytes.

        Args:
            where: A path, a URL, `env::key`, or the bytes themselves.
            root: The record's media folder.

        Raises:
            BadSampleError: There is nothing there, it cannot be read, or it lies outside of `root`.
        """
        if isinstance(where, (bytes, bytearray, memoryview)):
            data = bytes(where)
        elif not isinstance(where, str):
            raise _bad("unsupported_medium", f"a medium is given as {type(where).__name__}, not as path, URL or bytes.")
        elif where.startswith("data:"):
            return _read_data_url(where)
        else:
            if self.confine:
                _check_confined(where, root)
            data = self._read_named(where)
        if not data:
            raise _bad("empty_file", f"{_show(where)} has zero bytes.")
        return data

    def size(self, where: Any) -> int:
        """Return how many bytes the medium has, 0 where that is not known: for planning, never an error."""
        if isinstance(where, (bytes, bytearray, memoryview)):
            return len(where)
        if not isinstance(where, str):
            return 0
        if where.startswith("data:"):
            return len(where)
        try:
            if "://" in where:
                store, name = self._open(where)
                return store.head(name).size
            return len(read_lmdb(where)) if LMDB_SEPARATOR in where else Path(where).stat().st_size
        except (BadSampleError, ConfigError, StorageError, OSError, ValueError):
            return 0

    def _read_named(self, where: str) -> bytes:
        if "://" in where:
            return self._read_url(where)
        if LMDB_SEPARATOR in where and not Path(where).exists():
            return read_lmdb(where)
        return _read_file(where)

    def _open(self, url: str) -> tuple[Store, str]:
        from vlm_stream.storage import open_store

        scheme, _, rest = url.partition("://")
        bucket, _, name = rest.partition("/")
        root = f"{scheme}://{bucket}"
        if root not in self._stores:
            self._stores[root] = open_store(root, self.options)
        return self._stores[root], name

    def _read_url(self, url: str) -> bytes:
        if url.startswith("file://"):
            return _read_file(url.removeprefix("file://"))
        try:
            store, name = self._open(url)
            return bytes(store.get(name))
        except ConfigError as error:
            raise _bad("bad_url", f"{url} names no object ({error})") from error
        except NotFoundError as error:
            raise _bad("missing_file", f"there is nothing at {url}.") from error
        except AccessError as error:
            raise _bad("no_access", f"{url} may not be read ({error}).") from error
        except StorageError as error:
            raise _bad("fetch_failed", f"{url} could not be fetched ({error}).") from error


def _read_file(where: str) -> bytes:
    try:
        # A device or a pipe would be read for ever: only regular files are media.
        found = os.stat(where)  # noqa: PTH116 (Path costs more than the call, per file)
        if not stat.S_ISREG(found.st_mode):
            raise _bad("not_a_file", f"{where} is a folder or a device, not a file.")
        descriptor = os.open(where, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        try:
            data = os.read(descriptor, found.st_size + 1)  # one more, so that the end is seen in the same call
            if len(data) == found.st_size:
                return data
            parts = [data]
            while parts[-1]:  # it grew or shrank, or one call does not give so much
                parts.append(os.read(descriptor, _READ_BYTES))
            return b"".join(parts)
        finally:
            os.close(descriptor)
    except (FileNotFoundError, NotADirectoryError) as error:
        hint = "" if os.path.isabs(where) else " (looked for in the current folder; media_dir says where files lie)"  # noqa: PTH117
        raise _bad("missing_file", f"there is no file {where}{hint}.") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise _bad("unreadable_file", f"{where!r} cannot be read ({reason}).") from error


def _read_data_url(url: str) -> bytes:
    head, comma, body = url.partition(",")
    try:
        if not comma:
            raise ValueError("no comma")
        data = base64.b64decode(body, validate=True) if head.endswith(";base64") else unquote_to_bytes(body)
    except (ValueError, binascii.Error) as error:
        raise _bad("bad_data_url", f"{_show(url)} is not a data URL ({error}).") from error
    if not data:
        raise _bad("empty_file", f"{_show(url)} has zero bytes.")
    return data


def _check_confined(where: str, root: str | None) -> None:
    if root is None:
        raise _bad("escapes_media_dir", f"{where} cannot be confined: its source has no media_dir.")
    if "://" in where and not where.startswith("file://"):
        inside = where.startswith(root.rstrip("/") + "/") and ".." not in where.split("/")
    else:
        path = where.removeprefix("file://")
        path = path.partition(LMDB_SEPARATOR)[0] if not Path(path).exists() else path
        folder = os.path.realpath(root.removeprefix("file://"))
        try:
            inside = os.path.commonpath((folder, os.path.realpath(path))) == folder
        except ValueError as error:  # a NUL
            raise _bad("unreadable_file", f"{where[:200]!r} is no path ({error}).") from error
    if not inside:
        raise _bad("escapes_media_dir", f"{where} lies outside of {root}, and media are confined to it.")


def _show(where: object) -> str:
    text = where if isinstance(where, str) else f"a medium given as {type(where).__name__}"
    return text if len(text) <= 200 else f"{text[:100]}..."


def _bad(reason: str, detail: str) -> BadSampleError:
    return BadSampleError("convert", reason, detail)
