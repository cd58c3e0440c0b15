"""vlm_stream itself, through the same public names that its users call."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from benchmarks.peers.loaders.base import Loader, Opening, Run
from benchmarks.peers.work import FPS, MAX_FRAMES, build_real_processor, encode_members

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from benchmarks.peers.data import Record

__all__ = ["OurLoader"]


class OurLoader(Loader):
    """`vlm_stream.StreamLoader`: packs with a processor; without one samples as bytes, in plan order."""

    name = "vlm_stream"
    package = "vlm_stream"

    def version(self) -> str:
        """Return the version of this checkout, which need not be installed."""
        import vlm_stream

        return vlm_stream.__version__

    def write(self, records: Iterable[Record], out: Path, samples_per_shard: int) -> None:
        """Write with `make_shards` from the raw file that the records come from, and count its tokens."""
        from vlm_stream import make_shards

        raw = next(iter(records)).file
        processor = out.with_name("processor")
        build_real_processor().save_pretrained(processor)
        make_shards(
            raw,
            out,
            samples_per_shard=samples_per_shard,
            media_dir=str(raw.parent),
            processor=str(processor),
            shuffle=0,
        )

    def open(self, opening: Opening, state: bytes | None = None) -> Run:
        """Open a stream of raw samples."""
        plain = {"mode": "plain", "batch_size": opening.batch_size}
        return _Run(opening, state, processor=None, collate_fn=_Collate(opening.transform), **plain)

    def packs(self, opening: Opening, capacity: int, states: Sequence[bytes] = ()) -> Run:
        """Open a stream of packs: encoded by this package, or of whatever else the transform makes of samples."""
        state = states[0] if states else None
        if opening.transform is not encode_members:
            collate = _Collate(opening.transform)
            return _Packs(opening, state, pack_size=capacity, processor=None, collate_fn=collate)
        clips = {"fps": FPS, "max_frames": MAX_FRAMES}
        return _Packs(opening, state, pack_size=capacity, processor=build_real_processor(), with_refs=True, **clips)


class _Run(Run):
    def __init__(self, opening: Opening, state: bytes | None, **more: Any) -> None:
        from vlm_stream import RayBuilders, StreamLoader

        options = dict(opening.options)
        if options.pop("ray", False):
            from benchmarks.peers.loaders.ray_tars import open_cluster

            open_cluster()
            options["builders"] = RayBuilders(count=opening.workers, local=0)
        else:
            options["num_workers"] = opening.workers
        self._is_compact = options.get("pixels") == "compact"
        self._loader = StreamLoader(
            json.loads(opening.where) if opening.where.startswith("[") else opening.where,
            shuffle=bool(opening.shuffle),
            seed=opening.seed,
            rank=opening.rank,
            world_size=opening.world_size,
            bad_budget=None,
            store=_store_options() if opening.where.startswith("s3://") else None,
            **options,
            **more,
        )
        if state is not None:
            self._loader.load_state_dict(json.loads(state))

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            yield batch["samples"]

    def state(self) -> bytes:
        return json.dumps(self._loader.state_dict()).encode()

    def notes(self) -> list[str]:
        return [str(bad) for bad in self._loader.ledger.newest]

    def close(self) -> None:
        self._loader.close()

    def worker_pids(self) -> list[int]:
        return self._loader.worker_pids()


class _Packs(_Run):
    def __iter__(self) -> Iterator[Any]:
        from vlm_stream import finish_pixels

        for batch in self._loader:
            if "refs" not in batch:
                samples = batch["samples"]
                yield {name + "s": [sample[name] for sample in samples] for name in ("key", "length")}
                continue
            pack = finish_pixels(batch) if self._is_compact else batch
            ((row,), positions) = pack["refs"], pack["position_ids"].reshape(-1, pack["input_ids"].shape[-1])[0]
            begins = [*(positions == 0).nonzero().flatten().tolist(), len(positions)]
            lengths = [end - begin for begin, end in pairwise(begins)]
            yield {**pack, "keys": [ref[-1] for ref in row], "lengths": lengths}


class _Collate:
    """Makes of a batch what every loader of the comparison hands over."""

    def __init__(self, transform: Callable[[dict[str, bytes]], Any] | None) -> None:
        self._transform = transform

    def __call__(self, rows: list[Any], _processor: Any) -> dict[str, Any]:
        flat = [sample for row in rows for sample in (row if isinstance(row, list) else [row])]
        # Keys are numbers of the conversion, in the order of the records: all loaders call a sample by these.
        members = [{"__key__": f"{int(row.key):08d}", **row.members} for row in flat]
        return {"samples": [(self._transform or _owned)(each) for each in members]}


def _owned(members: dict[str, Any]) -> dict[str, Any]:
    """Return a sample that can be sent by a worker: members are views of what was read."""
    return {name: content if isinstance(content, str) else bytes(content) for name, content in members.items()}


def _store_options() -> Any:
    from vlm_stream.storage import StoreOptions

    return StoreOptions(endpoint=os.environ["AWS_ENDPOINT_URL"], region=os.environ["AWS_REGION"], allow_http=True)
