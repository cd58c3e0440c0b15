"""Megatron-Energon: indexed tars in slices for each worker, a shuffle buffer, a state that restores its samples."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from benchmarks.peers.loaders.base import Loader, Opening, Run
from benchmarks.peers.loaders.webdataset_tars import WebDatasetLoader
from benchmarks.peers.work import join

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from benchmarks.peers.data import Record

__all__ = ["EnergonLoader"]

_PROFILE = "peers"


@dataclass
class _Batch:
    """A batch or a pack. A dataclass, as its own are: torch's loader would walk through a list and change tuples."""

    samples: Any


class EnergonLoader(Loader):
    """`CrudeWebdataset` with a cooker in `get_savable_loader`, nothing decoded."""

    name = "energon"
    package = "megatron-energon"
    cannot: ClassVar = {
        "world": "a state is of one rank with its workers; its tool divides anew only if ranks x workers stays equal",
    }

    def write(self, records: Iterable[Record], out: Path, samples_per_shard: int) -> None:
        """Write with WebDataset's `ShardWriter`, then `energon prepare`, both as its documentation has it."""
        WebDatasetLoader().write(records, out, samples_per_shard)
        command = [str(Path(sys.executable).with_name("energon")), "prepare", str(out), "--non-interactive"]
        command += ["--split-ratio", "1,0,0", "--sample-type", "CrudeWebdataset", "--num-workers", "2", "--no-progress"]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    def open(self, opening: Opening, state: bytes | None = None) -> Run:
        """Open the dataset: in the order of its files, or as training data of one epoch."""
        return _Run(opening, state)

    def packs(self, opening: Opening, capacity: int, states: Sequence[bytes] = ()) -> Run:
        """Pack in the workers by its hooks, first-fit decreasing.

        It has the hooks and a buffer, but no packer: the selection is written here, as its users write it.
        """
        state = states[opening.rank % len(states)] if states else None
        encoder = _packing_encoder(opening.transform, capacity)
        return _Run(opening, state, encoder, packing_buffer_size=opening.hooked, batch_size=None)


class _Run(Run):
    def __init__(self, opening: Opening, state: bytes | None, encoder: Any = None, **packing: Any) -> None:
        import torch
        from megatron.energon import get_savable_loader

        self._loader = get_savable_loader(_dataset(opening, encoder or _encoder(opening.transform), **packing))
        if state is not None:
            self._loader.restore_state_rank(torch.load(io.BytesIO(state), weights_only=False))

    def __iter__(self) -> Iterator[list[Any]]:
        for batch in self._loader:
            yield batch.samples

    def state(self) -> bytes:
        import torch

        buffer = io.BytesIO()
        torch.save(self._loader.save_state_rank(), buffer)
        return buffer.getvalue()

    def close(self) -> None:
        self._loader = None


def _dataset(opening: Opening, encoder: Any, **packing: Any) -> Any:
    from megatron.energon import WorkerConfig, get_train_dataset, get_val_dataset

    workers = WorkerConfig(
        rank=opening.rank, world_size=opening.world_size, num_workers=opening.workers, seed_offset=opening.seed
    )
    settings = {
        "split_part": "train",
        "worker_config": workers,
        "batch_size": opening.batch_size,
        "packing_buffer_size": None,
        "task_encoder": encoder,
    } | packing
    path = _path(opening)
    if opening.shuffle:
        order = {"shuffle_buffer_size": opening.shuffle, "max_samples_per_sequence": 100, "repeat": False}
        dataset = get_train_dataset(path, **order, **settings)
    else:
        # Training data are always shuffled by slices; this is its way to read files in order, once.
        dataset = get_val_dataset(path, **settings)
    if path.startswith("msc://"):
        _hang_up()
    return dataset


def _hang_up() -> None:
    """Close the connections that opening the dataset left behind.

    Its paths keep their client over a fork, and two workers on one connection get each other's answers: 2 of 10 runs
    with workers died of it, none of 20 once the connections were closed.
    """
    import multistorageclient

    client, _ = multistorageclient.resolve_storage_client(f"msc://{_PROFILE}")
    client._storage_provider._s3_client.close()


def _encoder(transform: Callable[[dict[str, bytes]], Any] | None) -> Any:
    from megatron.energon import Cooker, DefaultTaskEncoder, Sample, basic_sample_keys, edataclass, stateless

    @edataclass
    class Members(Sample):
        members: dict[str, Any]

    @stateless
    def cook(sample: dict[str, Any]) -> Members:
        members = {name: value for name, value in sample.items() if name == "__key__" or not name.startswith("__")}
        return Members(**basic_sample_keys(sample), members=members)

    class Encoder(DefaultTaskEncoder):
        decoder = None  # bytes as they are
        cookers = (Cooker(cook),)

        @stateless
        def encode_sample(self, sample: Members) -> Any:
            return sample.members if transform is None else transform(sample.members)

        @stateless
        def batch(self, samples: list[Any]) -> _Batch:
            return _Batch(samples)

    return Encoder()


def _packing_encoder(transform: Callable[[dict[str, bytes]], Any] | None, capacity: int) -> Any:
    from megatron.energon import Sample, edataclass, stateless

    assert transform is not None

    @edataclass
    class Encoded(Sample):
        sample: dict[str, Any]

    class Encoder(type(_encoder(None))):  # type: ignore[misc]
        @stateless
        def encode_sample(self, sample: Any) -> Encoded:
            return Encoded.derive_from(sample, sample=transform(sample.members))

        def select_samples_to_pack(self, samples: list[Encoded]) -> list[list[Encoded]]:
            chosen = first_fit_decreasing([each.sample["length"] for each in samples], capacity)
            return [[samples[place] for place in pack] for pack in chosen]

        @stateless
        def pack_selected_samples(self, samples: list[Encoded]) -> _Batch:
            return _Batch(join([each.sample for each in samples]))

    return Encoder()


def first_fit_decreasing(lengths: list[int], capacity: int) -> list[list[int]]:
    """Put each place, longest first, into the first pack with room; what is longer than a pack gets its own."""
    packs: list[list[int]] = []
    room: list[int] = []
    for place in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        length = lengths[place]
        number = next((number for number, left in enumerate(room) if length <= left), len(packs))
        if number == len(packs):
            packs.append([])
            room.append(capacity)
        packs[number].append(place)
        room[number] -= length
    return packs


def _path(opening: Opening) -> str:
    if not opening.where.startswith("s3://"):
        return opening.where
    import yaml

    bucket, _, prefix = opening.where.removeprefix("s3://").partition("/")
    options = {"base_path": bucket}
    options |= {
        option: value
        for option, name in (("endpoint_url", "AWS_ENDPOINT_URL"), ("region_name", "AWS_REGION"))
        if (value := os.environ.get(name))
    }
    # Its way to object stores is a profile of the multi-storage client; keys are found in the environment.
    config = {"profiles": {_PROFILE: {"storage_provider": {"type": "s3", "options": options}}}}
    file = Path(opening.scratch) / "msc_config.yaml"
    file.write_text(yaml.safe_dump(config))
    os.environ["MSC_CONFIG"] = str(file)
    return f"msc://{_PROFILE}/{prefix}"
