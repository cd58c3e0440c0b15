"""Make a large dataset of a small one: its shards under many names, by hard links, and an index that lists them all.

Every sample is real, and so is what a loader reads to know of them; on disk there is each byte once.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["link"]

Names = list[tuple[str, str]]
"""New names of shards with their old ones."""


def link(loader: str, source: Path, out: Path, copies: int) -> None:
    """Write a loader's dataset that has the shards of another one so many times."""
    part = out.with_suffix(".part")
    part.mkdir()
    shards = sorted(path.name for path in source.iterdir() if path.suffix in (".tar", ".mds", ".bin", ".parquet"))
    beside = [path.name for path in source.iterdir() if path.name.endswith((".index.parquet", ".clips.bin", ".idx"))]
    prefixes = [f"{number:05d}-" for number in range(copies)]
    for prefix in prefixes:
        for name in {*shards, *beside}:
            os.link(source / name, part / (prefix + name))
    shards = [name for name in shards if name not in beside]
    _LISTS.get(loader, _list_nothing)(source, part, [(prefix + name, name) for prefix in prefixes for name in shards])
    part.rename(out)


def _list_nothing(_source: Path, _out: Path, _names: Names) -> None:
    """WebDataset, HF datasets and Ray Data look at the folder."""


def _list_ours(source: Path, out: Path, names: Names) -> None:
    from vlm_stream.format import ShardList, load_manifest, save_manifest
    from vlm_stream.storage import open_store

    manifest = load_manifest(open_store(str(source)))
    by_name = {shard.name: shard for shard in manifest.shards}
    shards = [replace(by_name[old], name=new, etag=None) for new, old in names]
    save_manifest(open_store(str(out)), replace(manifest, shards=ShardList.of(shards), home=""))


def _list_energon(source: Path, out: Path, names: Names) -> None:
    meta = out / ".nv-meta"
    meta.mkdir()
    for path in (source / ".nv-meta").iterdir():
        os.link(path, meta / path.name)
    info = json.loads((source / ".nv-meta" / ".info.json").read_text())
    counts = {new: info["shard_counts"][old] for new, old in names}
    _write(meta / ".info.json", info | {"shard_counts": counts})
    _write(meta / "split.yaml", {"split_parts": {"train": list(counts), "val": [], "test": []}, "exclude": []})


def _list_mosaic(source: Path, out: Path, names: Names) -> None:
    index = json.loads((source / "index.json").read_text())
    shards = {shard["raw_data"]["basename"]: shard for shard in index["shards"]}
    renamed = [shards[old] | {"raw_data": shards[old]["raw_data"] | {"basename": new}} for new, old in names]
    _write(out / "index.json", index | {"shards": renamed})


def _list_litdata(source: Path, out: Path, names: Names) -> None:
    index = json.loads((source / "index.json").read_text())
    chunks = {chunk["filename"]: chunk for chunk in index["chunks"]}
    _write(out / "index.json", index | {"chunks": [chunks[old] | {"filename": new} for new, old in names]})


def _write(file: Path, content: Any) -> None:
    file.unlink(missing_ok=True)  # it may be a link to the small dataset's own
    file.write_text(json.dumps(content))  # JSON is YAML too


_LISTS: dict[str, Callable[[Path, Path, Names], None]] = {
    "vlm_stream": _list_ours,
    "energon": _list_energon,
    "mosaic": _list_mosaic,
    "litdata": _list_litdata,
}
