"""A data file as records in a chosen order: `sample_ratio` and rank shares choose, the form maps.

A record that cannot be parsed or mapped raises when it is read, with `file:line`.
"""

from __future__ import annotations

import random
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from vlm_stream.errors import BadSampleError, SourceError
from vlm_stream.sources.data_file import DataFile, NotJsonError
from vlm_stream.sources.form import Mismatch, OnMismatch, ShareGptForm, apply_policy, check_policy
from vlm_stream.sources.record import Record
from vlm_stream.sources.sharegpt import convert_example

__all__ = [
    "Catalog",
    "Order",
    "load_json_or_jsonl",
    "load_jsonl_for_rank",
    "rank_share",
    "sample_order",
]

Order: TypeAlias = npt.NDArray[np.int64]

_SEED = 42


def sample_order(num_records: int, ratio: float) -> Order | None:
    """Return which records a ratio takes, in order; None when that is all of them as they stand.

    Below 1 it is a random choice in random order, `Random(42).sample(range(n), floor(n * ratio))`, but never less than
    one record; above 1 whole repeats, then a random choice for the fraction.

    >>> sample_order(10, 0.5).tolist()
    [1, 0, 4, 9, 6]
    """
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 < ratio < float("inf"):
        raise SourceError(
            f"sample_ratio is {ratio!r}, which takes no sample; write a number above 0, "
            "or leave the entry out with the names filter."
        )
    if ratio == 1:
        return None
    if not num_records:
        return np.zeros(0, np.int64)
    if ratio < 1:
        return _choose(num_records, max(1, int(num_records * ratio)))
    repeats = int(ratio)
    whole = np.tile(np.arange(num_records, dtype=np.int64), repeats)
    return np.concatenate([whole, _choose(num_records, int(num_records * (ratio - repeats)))])


def rank_share(order: Order | None, num_records: int, rank: int, world_size: int, begin: int = 0) -> Order:
    """Return every `world_size`-th entry of an order, for one rank.

    `begin` is how many entries of earlier sources were dealt out before: dealing goes on where it stopped, so over all
    sources the ranks differ by one entry at most, every entry has one rank, and none is dropped.
    """
    first = (rank - begin) % world_size
    if order is None:
        return np.arange(first, num_records, world_size, dtype=np.int64)
    return order[first::world_size]


def _choose(num_records: int, num_chosen: int) -> Order:
    return np.array(random.Random(_SEED).sample(range(num_records), num_chosen), np.int64)


class Catalog:
    """The records of one data file in a chosen order, as conversations."""

    def __init__(
        self,
        data: DataFile,
        *,
        name: str,
        form: ShareGptForm | None = None,
        on_mismatch: OnMismatch = "drop",
        order: Order | None = None,
    ) -> None:
        """Read `data` through `form`.

        Args:
            data: The scanned file.
            name: What ledgers and shards call this source.
            form: How columns and roles are called; the sharegpt defaults if None.
            on_mismatch: What happens to a record that does not map whole.
            order: Record numbers of the file in the order of this source, with repeats; all of them once if None.
        """
        check_policy(on_mismatch)
        self.name = name
        self.data = data
        self.form = form or ShareGptForm()
        self.on_mismatch = on_mismatch
        self.order = order

    def __len__(self) -> int:
        """Return the number of records, bad ones included."""
        return len(self.data) if self.order is None else len(self.order)

    def origin(self, index: int) -> str:
        """Return `file:line` of a record, good or bad."""
        return self.data.where(self._number(index))

    def _number(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of source '{self.name}', which has {len(self)}")
        return index if self.order is None else int(self.order[index])

    def read(self, index: int) -> Record:
        """Return one record; raise `BadSampleError` (under `raise`: `SourceError`) when it cannot be used."""
        number = self._number(index)
        origin = self.data.where(number)
        try:
            example = self.data.load(number)
        except NotJsonError as error:
            apply_policy([], [Mismatch(error.reason, str(error))], self.on_mismatch, origin)
            raise  # not reached: without a conversation every policy raises
        extras = convert_example(example, self.form, self.on_mismatch, origin)
        own_id = example.get("id")
        has_id = isinstance(own_id, (str, int)) and not isinstance(own_id, bool) and own_id != ""
        return Record(
            source=self.name,
            id=str(own_id) if has_id else str(number),
            has_id=has_id,
            origin=origin,
            conversation=extras.pop("conversation"),
            media_root=self.form.media_dir,
            extras=extras,
        )


def load_json_or_jsonl(file_path: str) -> list[Any]:
    """Return all examples of a JSON array or JSONL file; a broken one raises `BadSampleError` with `file:line`."""
    data = DataFile(str(file_path))
    return [_load(data, number) for number in range(len(data))]


def load_jsonl_for_rank(
    file_path: str, sample_ratio: float, rank: int | None, world_size: int | None
) -> tuple[list[Any], int]:
    """Return this rank's examples, and the number of records in the file; only the former are parsed."""
    data = DataFile(str(file_path))
    order = sample_order(len(data), sample_ratio)
    if rank is not None and world_size is not None and world_size > 1:
        order = rank_share(order, len(data), rank, world_size)
    numbers = np.arange(len(data)) if order is None else order
    return [_load(data, number) for number in numbers.tolist()], len(data)


def _load(data: DataFile, number: int) -> Any:
    try:
        return data.load(number)
    except NotJsonError as error:
        detail = f"{data.where(number)}: {error}, so the file cannot be loaded whole. Mend or delete the record."
        raise BadSampleError("convert", error.reason, detail) from None
