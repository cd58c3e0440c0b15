"""LitData: chunks with an offset table that are mapped in place, or downloaded whole and mapped from a cache.

A sample is one `bytes` leaf with its members as a pickled dict: leaves are fixed for a dataset, and one for each
medium was measured to cost more. `bytes` leaves are handed over as views of the mapped chunk, so that members are
copied once; `litdata.File` leaves would be copied before.
"""

from __future__ import annotations

import io
import os
import pickle
from typing import TYPE_CHECKING, Any

from benchmarks.peers.loaders.base import Loader, Opening, Run

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from benchmarks.peers.data import Record

__all__ = ["LitDataLoader"]


class LitDataLoader(Loader):
    """`litdata.optimize`, `litdata.StreamingDataset` in `litdata.StreamingDataLoader`.

    `drop_last=False` for every world size, so that an epoch is complete and a state fits another world: with several
    ranks its default drops what does not divide evenly, and a state is refused where the setting differs.
    """

    name = "litdata"
    package = "litdata"
    files = "*.bin"

    def write(self, records: Iterable[Record], out: Path, samples_per_shard: int) -> None:
        """Write with `optimize`, in one process so that the order stays."""
        import litdata

        litdata.optimize(
            fn=_pickled,
            inputs=list(records),
            output_dir=str(out),
            chunk_size=samples_per_shard,
            num_workers=1,
            keep_data_ordered=True,
            reorder_files=False,
            start_method="fork",
            verbose=False,
        )

    def open(self, opening: Opening, state: bytes | None = None) -> Run:
        """Open the folder in place, or the prefix with its chunks downloaded to the scratch folder."""
        return _Run(opening, state)


def _pickled(record: Record) -> bytes:
    return pickle.dumps({"__key__": record.key} | record.members())


class _Run(Run):
    def __init__(self, opening: Opening, state: bytes | None) -> None:
        # By these it knows its rank; every rank is a node, so that ranks can be measured one by one.
        os.environ |= {
            "WORLD_SIZE": str(opening.world_size),
            "GLOBAL_RANK": str(opening.rank),
            "NNODES": str(opening.world_size),
        }
        import litdata

        source: dict[str, Any] = {}
        if opening.where.startswith("s3://"):
            source = {
                "cache_dir": opening.scratch,
                "storage_options": _storage_options(),
                # A state names its cache folder and is refused beside another one, unless arguments may override it.
                "force_override_state_dict": state is not None,
            }
            _allow_http()
        transforms = [pickle.loads] if opening.transform is None else [pickle.loads, opening.transform]
        dataset = litdata.StreamingDataset(
            opening.where,
            shuffle=opening.shuffle > 0,
            # Chunks in random order and all of a chunk's samples mixed: it never mixes the samples of several chunks.
            item_shuffle_window="full",
            # Views of all samples of a chunk at once. By default a downloaded chunk that workers share is read whole
            # for every few samples, which took ten times the CPU.
            batch_decode="all",
            seed=opening.seed,
            drop_last=False,
            transform=transforms,
            **source,
        )
        self._loader: Any = litdata.StreamingDataLoader(
            dataset, batch_size=opening.batch_size, num_workers=opening.workers, collate_fn=list
        )
        if state is not None:
            import torch

            self._loader.load_state_dict(torch.load(io.BytesIO(state)))

    def __iter__(self) -> Iterator[list[Any]]:
        return iter(self._loader)

    def state(self) -> bytes:
        """Return its state dict, saved by `torch.save` as its documentation shows."""
        import torch

        file = io.BytesIO()
        torch.save(self._loader.state_dict(), file)
        return file.getvalue()

    def close(self) -> None:
        """Drop the loader: its workers stop when it is collected."""
        self._loader = None


def _allow_http() -> None:
    """Let its fast client, which takes none of the storage options, reach an endpoint without TLS.

    It has no setting for that, and its older client is only a fallback: without this, no chunk could be read.
    """
    if os.environ["AWS_ENDPOINT_URL"].startswith("http://"):
        from litdata.streaming import downloader

        downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = "true"


def _storage_options() -> dict[str, str]:
    return {
        "endpoint_url": os.environ["AWS_ENDPOINT_URL"],
        "aws_access_key_id": os.environ["AWS_ACCESS_KEY_ID"],
        "aws_secret_access_key": os.environ["AWS_SECRET_ACCESS_KEY"],
        "region_name": os.environ["AWS_REGION"],
    }
