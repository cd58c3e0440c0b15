"""Where a record's media come from: a path, a URL, an LMDB entry or bytes become bytes.

Enters: what a media item names. Leaves: its bytes, or `BadSampleError` with a reason to count by; or its size, for
planning. What the bytes mean is not known here.

Web addresses are requested as written, with escapes and queries (signed URLs), and answers may lack a Content-Length:
the object stores' client can do neither.
"""

import base64
import binascii
import http.client
import os
import random
import ssl
import stat
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, unquote, unquote_to_bytes

from vlm_stream.clips import ClipTable
from vlm_stream.convert.web import PUBLIC, open_web
from vlm_stream.errors import AccessError, BadSampleError, ConfigError, NotFoundError, StorageError, say_error, shorten
from vlm_stream.media import DEFAULT_LIMITS, LMDB_SEPARATOR, MediaLimits, read_lmdb
from vlm_stream.storage import Store, StoreOptions, local_path, open_store, scheme_of

_CHUNK: Final = 1 << 20
_NAME_BYTES: Final = 4096  # no path is longer
_GONE: Final = (404, 410)
_REFUSED: Final = (401, 403)
_AGAIN: Final = (408, 425, 429, 500, 502, 503, 504)
_LEGAL: Final = "%/:=&?~#+!$,;'@()*[]"
"""Characters of a URL that are not escaped, because they mean something or are escapes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaRules:
    """What records may name, and how large it may be."""

    confine: bool = False
    """Refuse local files and URLs outside of the record's media folder, symbolic links resolved."""
    hosts: tuple[str, ...] = (PUBLIC,)
    """Hosts of web addresses."""
    limits: MediaLimits = DEFAULT_LIMITS


DEFAULT_RULES: Final = MediaRules()


@dataclass
class KeptFile:
    """A file that the next record is likely to show as well."""

    where: str = ""
    content: bytes = b""
    table: ClipTable | str | None = None  # or why it has none; None: not known yet
    stays: bool = False  # it is not stored: samples name the place where it is


@dataclass
class MediaReader:
    """Reads media for one worker; keeps the stores it has opened."""

    rules: MediaRules = DEFAULT_RULES
    options: StoreOptions | None = None
    _stores: dict[str, Store] = field(default_factory=dict)
    kept: KeptFile = field(default_factory=KeptFile)

    def read_shared(self, where: str, root: str | None) -> bytes:
        """Return the bytes of a file of which records that follow each other show parts: the last one is kept."""
        if self.kept.where != where:
            self.kept = KeptFile()  # two files at a time would be one too many
            self.kept = KeptFile(where, self.read(where, root))
        return self.kept.content

    def read(self, where: Any, root: str | None) -> bytes:
        """Return the bytes of a path, a URL, `env::key`, or bytes themselves; `root` is the record's folder."""
        if isinstance(where, (bytes, bytearray, memoryview)):
            data = bytes(where)
        elif not isinstance(where, str):
            raise _bad("unsupported_medium", f"a medium is given as {type(where).__name__}, not as path, URL or bytes.")
        elif where.startswith("data:"):
            data = _read_data_url(where)
        else:
            if self.rules.confine:
                _check_confined(where, root)
            data = self._read_named(where)
        if not data:
            raise _bad("empty_file", f"{_show(where)} has zero bytes.")
        return data

    def size(self, where: Any, root: str | None = None) -> int:
        """Return how many bytes the medium has, 0 where that is not known: for planning, never an error."""
        if isinstance(where, (bytes, bytearray, memoryview)) or (isinstance(where, str) and where.startswith("data:")):
            return len(where)
        if not isinstance(where, str):
            return 0
        try:
            if self.rules.confine:
                _check_confined(where, root)
            scheme = scheme_of(where)
            if scheme in ("http", "https"):
                with self._ask(where, "HEAD") as answer:
                    return int(answer.headers.get("Content-Length") or 0)
            if scheme != "file":
                store, name = self._open(where)
                return store.head(name).size
            path = local_path(where) if "://" in where else where
            return len(read_lmdb(path)) if LMDB_SEPARATOR in path else Path(path).stat().st_size
        except (BadSampleError, ConfigError, StorageError, OSError, ValueError, http.client.HTTPException):
            return 0

    def _read_named(self, where: str) -> bytes:
        scheme = scheme_of(where)
        if scheme in ("http", "https"):
            return self._read_web(where)
        if scheme != "file":
            return self._read_object(where)
        if "://" in where:
            try:
                return _read_file(local_path(where), self.rules.limits.file_bytes)
            except ConfigError as error:
                raise _bad("bad_url", f"{_show(where)} names no file ({error})") from error
        if len(where) > _NAME_BYTES:
            raise _bad(
                "not_a_path",
                f"a medium is a text of {len(where):,} characters ({where[:20]}...), which is no path; if it is "
                f"base64, write data:image/jpeg;base64, before it.",
            )
        if LMDB_SEPARATOR in where and not Path(where).exists():
            return read_lmdb(where)
        return _read_file(where, self.rules.limits.file_bytes)

    def _open(self, url: str) -> tuple[Store, str]:
        scheme, _, rest = url.partition("://")
        bucket, _, name = rest.partition("/")
        root = f"{scheme}://{bucket}"
        if root not in self._stores:
            self._stores[root] = open_store(root, self.options)
        return self._stores[root], name

    def _read_object(self, url: str) -> bytes:
        try:
            store, name = self._open(url)
            limit = self.rules.limits.file_bytes
            if scheme_of(url) in ("s3", "gs", "az") and store.head(name).size > limit:
                raise _too_large(url, limit)
            return bytes(store.get(name))
        except ConfigError as error:
            raise _bad("bad_url", f"{_show(url)} names no object ({error})") from error
        except NotFoundError as error:
            raise _bad("missing_file", f"there is nothing at {_show(url)}.") from error
        except AccessError as error:
            raise _bad("no_access", f"{_show(url)} may not be read ({error}).") from error
        except StorageError as error:
            raise _bad("fetch_failed", f"{_show(url)} could not be fetched ({error}).") from error

    @cached_property
    def _opener(self) -> urllib.request.OpenerDirector:
        """Return what sends requests: with the system's proxies, and the certificates of the options."""
        options = self.options or StoreOptions()
        context = ssl.create_default_context(cafile=options.ca_file)
        return open_web(self.rules.hosts, context, options.retry.deadline_s)

    def _ask(self, url: str, method: str = "GET") -> Any:
        options = self.options or StoreOptions()
        request = urllib.request.Request(quote(url, safe=_LEGAL), method=method)  # noqa: S310 (it is http or https)
        return self._opener.open(request, timeout=options.read_timeout_s)

    def _read_web(self, url: str) -> bytes:
        """Fetch a web address; what may be better the next time is tried again."""
        retry = (self.options or StoreOptions()).retry
        deadline = time.monotonic() + retry.deadline_s
        wait = retry.backoff_s
        for left in range(retry.max_retries, -1, -1):
            try:
                with self._ask(url) as answer:
                    return _read_body(answer, url, self.rules.limits.file_bytes, deadline)
            except urllib.error.HTTPError as error:
                error.close()
                if error.code in _GONE:
                    raise _bad("missing_file", f"there is nothing at {_show(url)} ({error}).") from error
                if error.code in _REFUSED:
                    raise _bad("no_access", f"{_show(url)} may not be read ({error}).") from error
                fault, final = str(error), error.code not in _AGAIN
            except (ValueError, http.client.InvalidURL, UnicodeError) as error:
                raise _bad("bad_url", f"{_show(url)} is no web address ({say_error(error)}).") from error
            except (OSError, http.client.HTTPException) as error:
                fault, final = say_error(error), False
            if final or not left or time.monotonic() + wait > deadline:
                raise _bad("fetch_failed", f"{_show(url)} could not be fetched ({fault}).")
            time.sleep(wait * (0.5 + random.random()))
            wait = min(2 * wait, retry.max_backoff_s)
        raise AssertionError("the last attempt returns or raises")


def _read_body(answer: Any, url: str, limit: int, deadline: float) -> bytes:
    """Return the body of an answer; raise for one that is too long, drips, or ends before it is whole."""
    parts, size = [], 0
    while part := answer.read1(_CHUNK):
        parts.append(part)
        size += len(part)
        if size > limit:
            raise _too_large(url, limit)
        if time.monotonic() > deadline:
            raise TimeoutError(f"after {size:,} bytes it was not whole at the deadline")
    if answer.length:
        raise http.client.IncompleteRead(b"", answer.length)
    return b"".join(parts)


def _read_file(where: str, limit: int) -> bytes:
    try:
        path = Path(where)
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # a device or a pipe would be read for ever
            raise _bad("not_a_file", f"{where} is a folder or a device, not a file.")
        if found.st_size > limit:
            raise _too_large(where, limit)
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        hint = "" if path.is_absolute() else " (looked for in the current folder; media_dir says where files lie)"
        raise _bad("missing_file", f"there is no file {where}{hint}.") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise _bad("unreadable_file", f"{_show(where)!r} cannot be read ({reason}).") from error


def _read_data_url(url: str) -> bytes:
    head, comma, body = url.partition(",")
    try:
        if not comma:
            raise ValueError("no comma")
        return base64.b64decode(body, validate=True) if head.endswith(";base64") else unquote_to_bytes(body)
    except (ValueError, binascii.Error) as error:
        raise _bad("bad_data_url", f"{_show(url)} is not a data URL ({error}).") from error


def _check_confined(where: str, root: str | None) -> None:
    if root is None:
        raise _bad("escapes_media_dir", f"{_show(where)} cannot be confined: its source has no media_dir.")
    try:
        if scheme_of(where) != "file":
            inside = where.startswith(root.rstrip("/") + "/") and ".." not in unquote(where).split("/")
        else:
            path = local_path(where) if "://" in where else where
            path = path.partition(LMDB_SEPARATOR)[0] if not Path(path).exists() else path
            folder = os.path.realpath(local_path(root) if "://" in root else root)
            inside = os.path.commonpath((folder, os.path.realpath(path))) == folder
    except (ValueError, OSError) as error:  # a NUL, a name that is too long, a host in a file URL
        raise _bad("unreadable_file", f"{_show(where)!r} is no path ({error}).") from error
    if not inside:
        raise _bad("escapes_media_dir", f"{_show(where)} lies outside of {root}, and media are confined to it.")


def _too_large(where: str, limit: int) -> BadSampleError:
    fact = f"{_show(where)} has more bytes than the limit of {limit:,}"
    return _bad("file_too_large", f"{fact}; media_limits sets the limit (file_bytes).")


def _show(where: object) -> str:
    return shorten(where, 300) if isinstance(where, str) else f"a medium given as {type(where).__name__}"


def _bad(reason: str, detail: str) -> BadSampleError:
    return BadSampleError("convert", reason, detail)
