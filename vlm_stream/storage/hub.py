"""Datasets on the Hugging Face Hub as a store: `hf://datasets/owner/name[@revision]/folder`.

Goes through huggingface_hub's filesystem, which finds its token in the standard places (`HF_TOKEN`, the login file).
Retries are those of `fetch.py`, as for every other network.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlm_stream.errors import ConfigError, MissingExtraError, VlmStreamError
from vlm_stream.storage.faults import error_of, fault_of, fault_of_status
from vlm_stream.storage.fetch import RangeBody, fetch_range
from vlm_stream.storage.metrics import ReadMetrics
from vlm_stream.storage.options import RetryOptions, StoreOptions
from vlm_stream.storage.retry import Fault
from vlm_stream.storage.traffic import Traffic
from vlm_stream.storage.url import check_path, join_url
from vlm_stream.storage.values import ObjectInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from vlm_stream.storage.store import Buffer, Fetched, PutData

__all__ = ["HubStore"]


class HubStore:
    """Files of one dataset repository. Each write is one commit."""

    def __init__(self, url: str, options: StoreOptions | None = None) -> None:
        """Check the URL; nothing is asked yet."""
        self._options = options or StoreOptions()
        self._root = url.rstrip("/")
        self._filesystems: dict[int, Any] = {}
        self._infos: dict[str, ObjectInfo] = {}
        if self._root.removeprefix("hf://").count("/") < 2 or not self._root.startswith("hf://datasets/"):
            raise ConfigError(f"'{url}' names no dataset of the Hub; write hf://datasets/owner/name/folder.")

    @property
    def root(self) -> str:
        """Return the URL without a slash at its end."""
        return self._root

    @property
    def retry(self) -> RetryOptions:
        """Return when ranges are tried again."""
        return self._options.retry

    def __reduce__(self) -> tuple[type[HubStore], tuple[str, StoreOptions]]:
        """Travel without connections."""
        return type(self), (self._root, self._options)

    def url(self, path: str) -> str:
        """Return the URL of one file."""
        return join_url(self._root, path)

    def get(self, path: str) -> bytes:
        """Return a whole file."""
        return bytes(self.fetch(path, 0, self.head(path).size).data)

    def get_ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        """Return the bytes of each `(offset, size)`."""
        return [self.fetch(path, offset, size).data for offset, size in ranges]

    def fetch(self, path: str, offset: int, size: int) -> Fetched:
        """Return one range with the file's size and etag."""
        return fetch_range(self, check_path(self._root, path), offset, size, Traffic(ReadMetrics(), 1))

    def open_range(self, path: str, offset: int, size: int | None) -> RangeBody:
        """Read a range, once. The filesystem gives it whole, so a broken body starts over."""
        info = self._infos.get(path)
        if info is None:
            info = self._infos[path] = self._info(path)
        end = info.size if size is None else min(offset + size, info.size)
        data = b""
        if end > offset:  # an empty range would be sent as an open one; read-ahead is the reader's concern
            data = self._filesystem().cat_file(self.url(path), start=offset, end=end, cache_type="none")
        return RangeBody(iter([data]), len(data), info.size, info.etag)

    def fault_of(self, error: Exception) -> Fault:
        """Return what the Hub's exception means."""
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status is not None:
            return fault_of_status(int(status), fault_of(error).text)
        if isinstance(error, PermissionError):
            return Fault("refused", fault_of(error).text)
        if type(error).__module__.partition(".")[0] in ("httpx", "httpcore", "requests", "urllib3"):
            return Fault("transient", f"{type(error).__name__}: {fault_of(error).text}")
        return fault_of(error)

    def put(self, path: str, data: PutData) -> None:
        """Commit one file."""
        if isinstance(data, os.PathLike):
            content: Any = Path(data).read_bytes()
        elif isinstance(data, (bytes, bytearray, memoryview)):
            content = bytes(data)
        elif isinstance(data, io.IOBase) or hasattr(data, "read"):
            content = data.read()
        else:
            raise ConfigError(
                f"put() was given {type(data).__name__}, which holds no bytes; give bytes, a binary file or a Path."
            )
        check_path(self._root, path)
        self._call(path, lambda files: files.pipe_file(self.url(path), content))
        self._infos.pop(path, None)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield every file whose path begins with `prefix`, sorted."""
        base = self._root.removeprefix("hf://") + "/"
        found = self._call("", lambda files: files.find(self._root, detail=True))
        for name in sorted(found):
            path = name.removeprefix(base)
            if path.startswith(prefix):
                yield _info_of(path, found[name])

    def head(self, path: str) -> ObjectInfo:
        """Return size and etag."""
        check_path(self._root, path)
        return self._call(path, lambda _files: self._info(path))  # type: ignore[no-any-return]

    def delete(self, path: str) -> None:
        """Commit the removal of one file."""
        self.head(path)
        self._call(path, lambda files: files.rm_file(self.url(path)))
        self._infos.pop(path, None)

    def _info(self, path: str) -> ObjectInfo:
        return _info_of(path, self._filesystem().info(self.url(path)))

    def _call(self, path: str, operation: Callable[[Any], Any]) -> Any:
        try:
            return operation(self._filesystem())
        except VlmStreamError:
            raise
        except Exception as error:
            raise error_of(self.fault_of(error), self.url(path), 0.0) from error

    def _filesystem(self) -> Any:
        pid = os.getpid()
        if pid not in self._filesystems:
            try:
                from huggingface_hub import HfFileSystem
            except ImportError:
                raise MissingExtraError("huggingface_hub", "hub", f"Reading {self._root}") from None
            self._filesystems[pid] = HfFileSystem(
                endpoint=self._options.endpoint,
                token=False if self._options.anonymous else None,
                skip_instance_cache=True,
            )
        return self._filesystems[pid]


def _info_of(path: str, info: dict[str, Any]) -> ObjectInfo:
    """Return the size and the content's own id: of the large-file storage where there is one, else of git."""
    lfs = info.get("lfs")
    etag = lfs["sha256"] if lfs else info.get("blob_id")
    return ObjectInfo(path, int(info["size"]), etag)
