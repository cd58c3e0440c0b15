"""HF datasets: parquet files streamed from front to end, a shuffle buffer, a position without the buffer's content.

Parquet, because its reader of tars wants the same members in every sample and parses every JSON; its writer leaves
media columns uncompressed, and its reader goes past the row groups before a position.
"""

from __future__ import annotations

import os
import pickle
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

from benchmarks.peers.loaders.base import Loader, Opening, Run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from benchmarks.peers.data import Record

__all__ = ["HfDatasetsLoader"]

_MEDIA = ("images", "videos")


class HfDatasetsLoader(Loader):
    """`load_dataset("parquet", streaming=True)` in torchdata's `StatefulDataLoader`."""

    name = "hf-datasets"
    package = "datasets"
    cannot: ClassVar = {
        "world": "a state counts in the files of one rank's workers: another world takes it in silence or fails on it",
        "header": "a parquet file has one footer and no header for each sample",
    }
    files = "*.parquet"

    def write(self, records: Iterable[Record], out: Path, samples_per_shard: int) -> None:
        """Write each shard with `Dataset.to_parquet`."""
        from datasets import Dataset, Features, Image, List, Value, Video
        from datasets.utils.logging import disable_progress_bar

        disable_progress_bar()
        features = Features(
            {
                "key": Value("string"),
                "json": Value("binary"),
                "images": List(Image(decode=False)),
                "videos": List(Video(decode=False)),
            }
        )
        out.mkdir(parents=True)
        records = iter(records)
        number = 0
        while rows := [_row(record) for record in islice(records, samples_per_shard)]:
            Dataset.from_list(rows, features=features).to_parquet(out / f"shard-{number:06d}.parquet")
            number += 1

    def open(self, opening: Opening, state: bytes | None = None) -> Run:
        """Open every parquet file of the folder or prefix."""
        return _Run(opening, state)


class _Run(Run):
    def __init__(self, opening: Opening, state: bytes | None) -> None:
        from datasets import config, load_dataset
        from datasets.distributed import split_dataset_by_node
        from torchdata.stateful_dataloader import StatefulDataLoader

        remote = opening.where.startswith("s3://")
        dataset = load_dataset(
            "parquet",
            data_files=f"{opening.where.rstrip('/')}/*.parquet",
            split="train",
            streaming=True,
            storage_options={"client_kwargs": {"endpoint_url": os.environ.get("AWS_ENDPOINT_URL")}} if remote else None,
        )
        if opening.world_size > 1:
            dataset = split_dataset_by_node(dataset, opening.rank, opening.world_size)
        if opening.shuffle:
            # Its default of 10 files at once makes a resume fail (IndexError) when a worker has fewer files than that.
            files_per_worker = max(1, dataset.num_shards // max(1, opening.workers))
            dataset = dataset.shuffle(
                seed=opening.seed, buffer_size=opening.shuffle, max_buffer_input_shards=min(10, files_per_worker)
            )
            # A pause at the end of an epoch against a fault of older pyarrow versions: a large part of a short run.
            config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0
        self._loader = StatefulDataLoader(
            dataset,
            batch_size=opening.batch_size,
            num_workers=opening.workers,
            collate_fn=_members_then(opening.transform),
        )
        if state is not None:
            self._loader.load_state_dict(pickle.loads(state))
        self._batches: Any = None

    def __iter__(self) -> Iterator[list[Any]]:
        self._batches = iter(self._loader)
        return self._batches

    def state(self) -> bytes:
        return pickle.dumps(self._loader.state_dict())

    def close(self) -> None:
        self._batches = self._loader = None


def _row(record: Record) -> dict[str, Any]:
    row: dict[str, Any] = {"key": record.key, "json": record.text, "images": [], "videos": []}
    for name, file in record.media:
        column = "videos" if name.endswith(".mp4") else "images"
        row[column].append({"path": name, "bytes": file.read_bytes()})
    return row


def _members_then(transform: Callable[[dict[str, bytes]], Any] | None) -> Callable[[list[dict[str, Any]]], list[Any]]:
    def members(row: dict[str, Any]) -> dict[str, Any]:
        media = {item["path"]: item["bytes"] for column in _MEDIA for item in row[column]}
        return {"__key__": row["key"], "json": row["json"]} | media

    if transform is None:
        return lambda rows: [members(row) for row in rows]
    return lambda rows: [transform(members(row)) for row in rows]
