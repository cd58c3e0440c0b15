"""Ray Data: tars read by tasks, samples encoded by two actors, a stream of blocks to the trainer."""

from __future__ import annotations

import os
import pickle
from typing import TYPE_CHECKING, Any, ClassVar

from benchmarks.peers.loaders.base import Loader, Opening, Run
from benchmarks.peers.loaders.webdataset_tars import WebDatasetLoader
from benchmarks.peers.work import encode_members

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from benchmarks.peers.data import Record

__all__ = ["RayDataLoader", "open_cluster"]

ADDRESS = "127.0.0.2"
"""Ray takes 127.0.0.1 for the address of the network."""
_STORE_BYTES = 2 << 30


def open_cluster() -> Any:
    """Start a cluster with two CPUs for builders on loopback, once; return Ray."""
    import ray

    if not ray.is_initialized():
        ray.init(
            address="local",
            _node_ip_address=ADDRESS,
            num_cpus=3,  # Ray Data wants one beside its actors
            object_store_memory=_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=40,
        )
    return ray


class RayDataLoader(Loader):
    """`ray.data.read_webdataset`, `map_batches` with actors, `streaming_split`."""

    name = "ray-data"
    package = "ray"
    cannot: ClassVar = {
        "state": "it has no position: a resume starts the epoch again",
        "ranks": "its ranks must read at the same time",
    }

    def write(self, records: Iterable[Record], out: Path, samples_per_shard: int) -> None:
        """Write tars as WebDataset does."""
        WebDatasetLoader().write(records, out, samples_per_shard)

    def open(self, opening: Opening, state: bytes | None = None) -> Run:
        """Open every tar of the folder or prefix."""
        return _Run(opening)


class _Run(Run):
    def __init__(self, opening: Opening) -> None:
        ray = open_cluster()
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        source: dict[str, Any] = {"paths": opening.where}
        if opening.where.startswith("s3://"):
            from pyarrow.fs import S3FileSystem

            endpoint = os.environ["AWS_ENDPOINT_URL"]
            files = S3FileSystem(endpoint_override=endpoint, region=os.environ["AWS_REGION"])
            source = {"paths": opening.where.removeprefix("s3://"), "filesystem": files}
        data = ray.data.read_webdataset(
            **source, file_extensions=["tar"], decoder=None, shuffle="files" if opening.shuffle else None
        )
        data = data.map_batches(
            _Apply,
            fn_constructor_args=(opening.transform,),
            concurrency=max(1, opening.workers),
            num_cpus=1,
            batch_size=opening.batch_size,
        )
        (self._split,) = data.streaming_split(1)
        more = {"local_shuffle_buffer_size": opening.shuffle, "local_shuffle_seed": opening.seed}
        self._settings = {"batch_size": opening.batch_size, "prefetch_batches": 4} | (more if opening.shuffle else {})

    def __iter__(self) -> Iterator[list[Any]]:
        for batch in self._split.iter_batches(**self._settings):
            yield _samples(batch)

    def worker_pids(self) -> list[int]:
        import psutil

        children = psutil.Process().children(recursive=True)
        return [child.pid for child in children if "MapWorker" in "".join(child.cmdline())]


class _Apply:
    """An actor's work: arrays of what was encoded, else pickled results."""

    def __init__(self, transform: Callable[[dict[str, bytes]], Any] | None) -> None:
        import torch

        torch.set_num_threads(1)
        self._transform = transform

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        import numpy as np

        samples = []
        for number, key in enumerate(batch["__key__"]):
            members = {name: column[number] for name, column in batch.items() if not name.startswith("__")}
            # A column is of all samples, and has another value where a sample has no such member.
            members = {"__key__": str(key)} | {name: each for name, each in members.items() if isinstance(each, bytes)}
            samples.append(members if self._transform is None else self._transform(members))
        if self._transform is not encode_members:
            return {"pickled": np.array([pickle.dumps(sample) for sample in samples], dtype=object)}
        found = {name: [sample[name] for sample in samples] for name in ("key", "length")}
        columns: dict[str, Any] = {name: np.array(values) for name, values in found.items()}
        for name in _TENSORS:
            columns[name] = np.empty(len(samples), dtype=object)
            nothing = np.empty((0, 0), np.float32 if name.startswith("pixel") else np.int64)
            for number, sample in enumerate(samples):
                columns[name][number] = sample[name].numpy() if name in sample else nothing
        return columns


_TENSORS = (
    *("input_ids", "attention_mask", "mm_token_type_ids", "pixel_values", "image_grid_thw"),
    *("pixel_values_videos", "video_grid_thw"),
)


def _samples(batch: dict[str, Any]) -> list[Any]:
    import torch

    if "pickled" in batch:
        return [pickle.loads(each) for each in batch["pickled"]]
    samples = []
    for number, key in enumerate(batch["key"]):
        arrays = {name: batch[name][number] for name in _TENSORS}
        tensors = {name: torch.from_numpy(each) for name, each in arrays.items() if each.size}
        samples.append({"key": str(key), "length": int(batch["length"][number]), **tensors})
    return samples
