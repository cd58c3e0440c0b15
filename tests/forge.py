"""Datasets that somebody has forged: whatever is changed, digests and checksums are right again."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from vlm_stream.format import (
    MANIFEST,
    FieldMap,
    Manifest,
    ShardList,
    TokenCounting,
    index_name,
    load_manifest,
    save_manifest,
)
from vlm_stream.storage import open_store

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["forge_index", "forge_manifest", "sealed_manifest", "write_parquet"]


def sealed_manifest(data: dict[str, Any]) -> str:
    """Return a manifest's JSON with the digest and the checksum of what is in it, where it can be read so far."""
    text = json.dumps(data)
    try:
        values = json.loads(text)
        for name in ("format", "version", "checksum", "digest", "totals"):
            values.pop(name)
        values["shards"] = ShardList.from_json(values["shards"])
        values["tokens"], values["fields"] = TokenCounting(**values["tokens"]), FieldMap(**values["fields"])
        return Manifest(**values).to_json()
    except Exception:
        return text


def forge_manifest(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the JSON of a manifest."""
    path = folder / MANIFEST
    data = json.loads(path.read_text())
    path.write_text(sealed_manifest(change(data) or data))


def write_parquet(table: pa.Table, path: Path, **options: Any) -> None:
    pq.write_table(table, path, **{"compression": "zstd", "write_statistics": False} | options)


def forge_index(folder: Path, number: int, table: pa.Table, *, samples: int | None = None, **options: Any) -> Any:
    """Write another index for a shard, and a manifest that describes it; return the shard's entry."""
    store = open_store(str(folder))
    manifest = load_manifest(store)
    shard = manifest.shards[number]
    path = folder / index_name(shard.name)
    write_parquet(table, path, **options)
    num_samples = shard.totals.samples if samples is None else samples
    shard = replace(
        shard,
        index_sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        totals=replace(shard.totals, samples=num_samples, bytes=max(shard.totals.bytes, 1024 * num_samples)),
        entries={"captions": num_samples},
    )
    shards = list(manifest.shards)
    shards[number] = shard
    save_manifest(store, replace(manifest, shards=ShardList.of(shards)))
    return shard
