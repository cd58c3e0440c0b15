"""Datasets on the Hugging Face Hub as a store: `hf://datasets/owner/name[@revision]/folder`.

Goes through huggingface_hub's filesystem, which finds its token in the standard places (`HF_TOKEN`, the login file) and
has retries and timeouts of its own: of the options only the endpoint and `anonymous` count here.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from vlm_stream.errors import ConfigError, VlmStreamError, require
from vlm_stream.storage.options import StoreOptions
from vlm_stream.storage.remote import Fault, error_of, fault_of, fault_of_status
from vlm_stream.storage.store import Fetched, ObjectInfo, Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


class HubStore(Store):
    """Files of one dataset repository. Each write is one commit."""

    def __init__(self, url: str, options: StoreOptions | None = None) -> None:
        self._options = options or StoreOptions()
        self.root = url.rstrip("/")
        self._files: Any = None
        self._infos: dict[str, ObjectInfo] = {}
        if self.root.removeprefix("hf://").count("/") < 2 or not self.root.startswith("hf://datasets/"):
            raise ConfigError(f"'{url}' names no dataset of the Hub; write hf://datasets/owner/name/folder.")

    def __reduce__(self) -> tuple[type[HubStore], tuple[str, StoreOptions]]:
        """Travel without connections."""
        return type(self), (self.root, self._options)

    def get(self, path: str) -> bytes:
        return bytes(self.fetch(path, 0, self.head(path).size).data)

    def fetch(self, path: str, offset: int, size: int) -> Fetched:
        info = self._infos.get(path)
        if info is None:
            info = self._infos[path] = self.head(path)
        end = min(offset + size, info.size)
        if end <= offset:  # an empty range would be sent as an open one
            return Fetched(b"", info.size, info.etag)
        data = self._call(path, lambda files: files.cat_file(self.url(path), start=offset, end=end, cache_type="none"))
        return Fetched(data, info.size, info.etag)

    async def fetch_async(self, path: str, offset: int, size: int) -> Fetched:
        return await asyncio.to_thread(self.fetch, path, offset, size)

    def put(self, path: str, data: bytes | Path) -> None:
        content = data if isinstance(data, bytes) else data.read_bytes()
        self.check_path(path)
        self._call(path, lambda files: files.pipe_file(self.url(path), content))
        self._infos.pop(path, None)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        base = self.root.removeprefix("hf://") + "/"
        found = self._call("", lambda files: files.find(self.root, detail=True))
        for name in sorted(found):
            path = name.removeprefix(base)
            if path.startswith(prefix):
                yield _info_of(path, found[name])

    def head(self, path: str) -> ObjectInfo:
        self.check_path(path)
        return _info_of(path, self._call(path, lambda files: files.info(self.url(path))))

    def delete(self, path: str) -> None:
        self.head(path)
        self._call(path, lambda files: files.rm_file(self.url(path)))
        self._infos.pop(path, None)

    def _call(self, path: str, operation: Callable[[Any], Any]) -> Any:
        begun_s = time.monotonic()
        try:
            return operation(self._filesystem())
        except VlmStreamError:
            raise
        except Exception as error:
            raise error_of(_fault_of(error), self.url(path), time.monotonic() - begun_s) from error

    def _filesystem(self) -> Any:
        if self._files is None:
            hub = require("huggingface_hub", "hub", f"Reading {self.root}")
            token = False if self._options.anonymous else None
            self._files = hub.HfFileSystem(endpoint=self._options.endpoint, token=token, skip_instance_cache=True)
        return self._files


def _fault_of(error: Exception) -> Fault:
    """Return what an exception of huggingface_hub means."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return fault_of_status(int(status), fault_of(error).text)
    if isinstance(error, PermissionError):
        return Fault("refused", fault_of(error).text)
    if type(error).__module__.partition(".")[0].startswith(("httpx", "httpcore", "requests", "urllib3")):
        return Fault("transient", f"{type(error).__name__}: {fault_of(error).text}")
    return fault_of(error)


def _info_of(path: str, info: dict[str, Any]) -> ObjectInfo:
    """Return the size and the content's own id: of the large-file storage where there is one, else of git."""
    lfs = info.get("lfs")
    etag = lfs["sha256"] if lfs else info.get("blob_id")
    return ObjectInfo(path, int(info["size"]), etag)
