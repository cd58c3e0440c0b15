"""vlm_stream itself, through the same public names that its users call."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from benchmarks.peers.loaders.base import Loader, Opening, Run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from benchmarks.peers.data import Record

__all__ = ["OurLoader"]


class OurLoader(Loader):
    """`vlm_stream.StreamLoader` without a processor: samples as bytes, in plan order."""

    name = "vlm_stream"
    package = "vlm_stream"
    checks_bytes = True
    processor: str | None = None
    """Where a processor was saved that text is counted with; None: bytes are all that will be asked for."""

    def version(self) -> str:
        """Return the version of this checkout, which need not be installed."""
        import vlm_stream

        return vlm_stream.__version__

    def write(self, records: Iterable[Record], out: Path, samples_per_shard: int) -> None:
        """Write with `make_shards`, from the raw file that the records come from."""
        from vlm_stream import make_shards

        raw = next(iter(records)).file
        make_shards(raw, out, samples_per_shard=samples_per_shard, media_dir=str(raw.parent), processor=self.processor)

    def open(self, opening: Opening, state: bytes | None = None) -> Run:
        """Open a stream of raw samples."""
        return _Run(opening, state)


class _Run(Run):
    def __init__(self, opening: Opening, state: bytes | None) -> None:
        from vlm_stream import StreamLoader

        self._loader = StreamLoader(
            opening.where,
            processor=None,
            mode="plain",
            batch_size=opening.batch_size,
            shuffle=bool(opening.shuffle),
            window=opening.shuffle or 4096,
            seed=opening.seed,
            num_workers=opening.workers,
            rank=opening.rank,
            world_size=opening.world_size,
            collate_fn=_Collate(opening.transform),
            bad_budget=None,
            store=_store_options() if opening.where.startswith("s3://") else None,
        )
        if state is not None:
            self._loader.load_state_dict(json.loads(state))

    def __iter__(self) -> Iterator[list[Any]]:
        for batch in self._loader:
            yield batch["samples"]

    def state(self) -> bytes:
        return json.dumps(self._loader.state_dict()).encode()

    def notes(self) -> list[str]:
        return [str(bad) for bad in self._loader.ledger.newest]


class _Collate:
    """Makes of a batch what every loader of the comparison hands over."""

    def __init__(self, transform: Callable[[dict[str, bytes]], Any] | None) -> None:
        self._transform = transform

    def __call__(self, rows: list[Any], _processor: Any) -> dict[str, Any]:
        transform = self._transform
        if transform is None:
            return {"samples": [{"__key__": row.key, **row.members} for row in rows]}
        return {"samples": [transform({"__key__": row.key, **row.members}) for row in rows]}


def _store_options() -> Any:
    from vlm_stream.storage import StoreOptions

    return StoreOptions(endpoint=os.environ["AWS_ENDPOINT_URL"], region=os.environ["AWS_REGION"], allow_http=True)
