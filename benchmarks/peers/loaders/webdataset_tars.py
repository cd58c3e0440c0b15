"""WebDataset: tars read from front to end, a shuffle buffer, no position."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from benchmarks.peers.loaders.base import Loader, Opening, Run

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from benchmarks.peers.data import Record

__all__ = ["WebDatasetLoader"]


class WebDatasetLoader(Loader):
    """`webdataset.WebDataset` in `webdataset.WebLoader`."""

    name = "webdataset"
    package = "webdataset"
    cannot: ClassVar = {
        "state": "it has no position: a resume starts the epoch again or skips by reading",
        "world": "it has no position",
        "packing": "it has none",
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
        return _Run(opening)


class _Run(Run):
    def __init__(self, opening: Opening) -> None:
        import webdataset

        rank, world = opening.rank, opening.world_size

        def of_rank(urls: Any) -> Iterator[Any]:
            for number, url in enumerate(urls):
                if number % world == rank:
                    yield url

        dataset = webdataset.WebDataset(
            _tars(opening.where),
            shardshuffle=100 if opening.shuffle else False,
            seed=opening.seed,
            nodesplitter=of_rank,
            workersplitter=webdataset.split_by_worker,
            empty_check=False,
        )
        if opening.shuffle:
            dataset = dataset.shuffle(opening.shuffle, initial=opening.shuffle)
        transform = opening.transform
        dataset = dataset.map(_members if transform is None else lambda sample: transform(_members(sample)))
        dataset = dataset.batched(opening.batch_size, collation_fn=list, partial=True)
        self._loader = webdataset.WebLoader(dataset, batch_size=None, num_workers=opening.workers)

    def __iter__(self) -> Iterator[list[Any]]:
        return iter(self._loader)


def _members(sample: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in sample.items() if name == "__key__" or not name.startswith("__")}


def _tars(where: str) -> list[str]:
    if not where.startswith("s3://"):
        return sorted(str(path) for path in Path(where).glob("*.tar"))
    import boto3

    bucket, _, prefix = where.removeprefix("s3://").partition("/")
    pages = boto3.client("s3").get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    keys = sorted(entry["Key"] for page in pages for entry in page.get("Contents", ()))
    # What its documentation shows for S3: the tar through a command's pipe.
    return [f"pipe:aws s3 cp --quiet s3://{bucket}/{key} -" for key in keys if key.endswith(".tar")]
