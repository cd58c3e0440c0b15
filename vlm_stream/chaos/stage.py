"""Where a recipe runs under chaos: copies of its local datasets, a proxy before its server, a cache of its own.

Enters: the arguments of the user's recipe. Leaves: those that trainers get, and those of the plan that they are
compared with. Nothing of the user's is written to.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

from vlm_stream.chaos.proxy import FaultProxy
from vlm_stream.errors import ConfigError
from vlm_stream.loader_options import LoaderOptions, parse_keywords
from vlm_stream.options import RUN_ARGUMENTS
from vlm_stream.recipe import SourceOptions, normalise_sources
from vlm_stream.storage import local_path, scheme_of

logger = logging.getLogger(__name__)

_TIMEOUT_S: Final = 10.0
_RESTARTS: Final = 1_000_000
_LEFT_OUT: Final = ("rank", "world_size", "device_mesh", "device", "dtype")
"""Ranks are the command's own; bytes are compared as builders send them, before any device."""
_COPIED: Final = ("*.tar", "*.parquet", "*.json")
_MAX_COPY_BYTES: Final = 20 << 30
_RETRY_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Copy:
    """A shard that may be damaged, and the user's own."""

    path: Path
    original: Path


class Stage:
    """Use it as a context manager."""

    def __init__(self, arguments: dict[str, Any], folder: Path) -> None:
        """Copy local datasets into the folder."""
        self._stack = contextlib.ExitStack()
        self.folder = folder
        self.shards: list[Copy] = []
        self.proxy: FaultProxy | None = None
        given = {"processor": None} | {name: value for name, value in arguments.items() if name not in _LEFT_OUT}
        options = {name: value for name, value in given.items() if name not in RUN_ARGUMENTS}
        stream, loader = parse_keywords(None, options)
        self._store = stream.store
        if not stream.train:
            raise ConfigError(
                "the recipe has train=False, and an evaluation has no state that trainers could resume from; give the "
                "recipe of a training run"
            )
        if loader.builders is not None:
            raise ConfigError(
                "the recipe has builders on Ray, whose machines are not this command's to end; set builders=null "
                "num_workers=2 to see the rest of the recipe under chaos (--set NAME=VALUE)"
            )
        self.has_builders = loader.num_workers > 0
        self.has_servers = loader.start_method in (None, "forkserver")
        sources = normalise_sources(given["sources"])
        usual = {"bad_budget": None, "with_refs": True}
        own = {each.name for each in fields(LoaderOptions)}
        self.planned = {name: value for name, value in given.items() if name not in own} | usual
        self.planned |= {"sources": _as_given(sources), "cache_dir": None, "cache_bytes": None}
        """Arguments of the undisturbed stream."""
        copied = [replace(source, url=self._copy(source)) for source in sources]
        self.arguments = (
            given
            | usual
            | {
                "sources": _as_given(copied),
                "worker_timeout": loader.worker_timeout or _TIMEOUT_S,
                "max_restarts": _RESTARTS,
                "ledger_path": None,
            }
        )
        """Arguments of the trainers' loaders."""
        self.cache: Path | None = None
        if stream.cache_dir is not None:
            self.cache = folder / "cache"
            self.arguments["cache_dir"] = str(self.cache)

    def __enter__(self) -> Stage:
        """Start the proxy, where the recipe names a server."""
        store = self._store
        if store is not None and store.endpoint is not None:
            self.proxy = self._stack.enter_context(FaultProxy(store.endpoint))
            retry = replace(store.retry, deadline_s=min(store.retry.deadline_s, _RETRY_S))
            self.arguments["store"] = replace(store, endpoint=self.proxy.endpoint, allow_http=True, retry=retry)
        return self

    def __exit__(self, *_: object) -> None:
        """End the proxy."""
        self._stack.close()

    def _copy(self, source: SourceOptions) -> str:
        """Copy a dataset that is a local folder; others are read where they are."""
        if scheme_of(source.url) != "file":
            return source.url
        root = Path(local_path(source.url))
        if not (root / "dataset.json").is_file():
            logger.warning("source '%s' is no folder with a manifest, so its shards are left in peace", source.name)
            return source.url
        paths = [path for pattern in _COPIED for path in sorted(root.rglob(pattern))]
        num_bytes = sum(path.stat().st_size for path in paths)
        if num_bytes > _MAX_COPY_BYTES:
            logger.warning(
                "source '%s' has %d GB, too much to be copied, so its shards are left in peace; give a part of it",
                source.name,
                num_bytes >> 30,
            )
            return source.url
        target = self.folder / "data" / source.name
        for path in paths:
            copy = target / path.relative_to(root)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
            if path.suffix == ".tar":
                self.shards.append(Copy(copy, path))
        return str(target)


def _as_given(sources: Any) -> dict[str, dict[str, Any]]:
    """Return sources in the form of a recipe, under the names that they have."""
    found = {}
    for source in sources:
        told = asdict(source)
        name, has_weight = told.pop("name"), told.pop("has_weight")
        found[name] = told if has_weight else {key: told[key] for key in told if key != "weight"}
    return found
