"""LMDB entries: `path/to/db::key` names one file inside a database.

Enters: that name. Leaves: the entry's bytes. Environments are opened read-only and unlocked, once per process and path:
a forked worker opens its own, because an LMDB environment must not cross a fork.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from vlm_stream.errors import BadSampleError, MissingExtraError

if TYPE_CHECKING:
    from pathlib import Path

LMDB_SEPARATOR: Final = "::"
_environments: dict[tuple[int, str], Any] = {}


def read_lmdb(name: str | Path) -> bytes:
    """Return the bytes of the entry that `path::key` names."""
    path, separator, key = str(name).partition(LMDB_SEPARATOR)
    if not separator or not path or not key:
        raise BadSampleError("convert", "bad_path", f"'{name}' does not name an LMDB entry (path::key).")
    try:
        lmdb = import_module("lmdb")
    except ImportError as error:
        raise MissingExtraError("lmdb", "lmdb", f"Reading '{name}'") from error
    place = (os.getpid(), path)
    if place not in _environments:
        try:
            _environments[place] = lmdb.open(path, readonly=True, lock=False, readahead=False, max_readers=512)
        except lmdb.Error as error:
            raise BadSampleError("convert", "missing_file", f"The LMDB '{path}' cannot be opened ({error}).") from error
    with _environments[place].begin(buffers=False) as transaction:
        value = transaction.get(key.encode())
    if value is None:
        raise BadSampleError("convert", "missing_file", f"The LMDB '{path}' holds no entry '{key}'.")
    return bytes(value)
