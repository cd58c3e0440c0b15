"""One data file as records in a chosen order: `sample_ratio` and rank shares choose, the form maps.

A record that cannot be read or mapped raises when it is read, with its place.
"""

import logging
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import crc32c
import numpy as np
import numpy.typing as npt

from vlm_stream.errors import BadSampleError, SourceError
from vlm_stream.sources.example_media import Mismatch, note_empty_media
from vlm_stream.sources.forms import ShareGptForm, recognise
from vlm_stream.sources.json_file import DataFile, UnreadableError
from vlm_stream.sources.known_forms import MEDIA_NAMES
from vlm_stream.sources.local_file import LocalFile
from vlm_stream.sources.record import Record
from vlm_stream.sources.sharegpt import (
    MISMATCHES_KEY,
    PASSENGER_KEYS,
    OnMismatch,
    apply_policy,
    convert_example,
)
from vlm_stream.sources.table_file import TableFiles, is_table
from vlm_stream.storage import StoreOptions

Order: TypeAlias = npt.NDArray[np.int64]

_LOG = logging.getLogger(__name__)
_SEED = 42
_NUM_FIRST = 50  # records that are looked at to tell the form


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

    `begin` is the number of entries of earlier sources: ranks take turns across sources, so their shares differ by one
    entry at most, every entry has one rank, and none is dropped.
    """
    first = (rank - begin) % world_size
    if order is None:
        return np.arange(first, num_records, world_size, dtype=np.int64)
    return order[first::world_size]


def _choose(num_records: int, num_chosen: int) -> Order:
    return np.array(random.Random(_SEED).sample(range(num_records), num_chosen), np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetaEntry:
    """One dataset, with its paths resolved and what is said of its form."""

    name: str
    """What ledgers and shards call it."""
    paths: tuple[str, ...]
    """The data file: a path or URL; or the files of one table."""
    columns: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    media_dir: str | None = None
    media_first: bool | None = None
    sample_ratio: float = 1.0


class FileCache:
    """Files that were made local or scanned already: entries may share one, and looking at an input opens it."""

    def __init__(self, store: StoreOptions | None = None) -> None:
        self.store = store
        self._local: dict[str, LocalFile] = {}
        self._opened: dict[tuple[str, ...], DataFile | TableFiles] = {}

    def local(self, path: str) -> LocalFile:
        if path not in self._local:
            self._local[path] = LocalFile(path, store=self.store)
        return self._local[path]

    def open(self, paths: tuple[str, ...]) -> DataFile | TableFiles:
        """Return the raw examples of a file, or the rows of the files of one table."""
        if paths not in self._opened:
            is_tables = is_table(paths[0])
            self._opened[paths] = TableFiles(paths, store=self.store) if is_tables else DataFile(self.local(paths[0]))
        return self._opened[paths]


def first_examples(data: DataFile | TableFiles) -> list[Any]:
    """Return the first examples that can be read."""
    found = []
    for number in range(min(_NUM_FIRST, len(data))):
        try:
            found.append(data.load(number))
        except UnreadableError:
            continue
    return found


class Catalog:
    """The records of one data file in a chosen order, as conversations."""

    def __init__(
        self, data: DataFile | TableFiles, entry: MetaEntry, order: Order | None, on_mismatch: OnMismatch
    ) -> None:
        """Recognise the form of a scanned file, and read it through that; what the entry says of it wins.

        `order` are record numbers of the file, with repeats; None: all of them come once.
        """
        self.name = entry.name
        self.on_mismatch = on_mismatch
        self.order = order
        said = entry.columns, entry.tags
        found = recognise(first_examples(data), *said, media_dir=entry.media_dir, media_first=entry.media_first)
        self.form = found.form if found else ShareGptForm.from_dicts(*said, entry.media_dir, bool(entry.media_first))
        self.line = found.line if found else ""  # what was recognised, for people
        if isinstance(data, TableFiles):
            form = self.form
            media = [form.images, form.videos, form.audios, form.start, form.end, *sum(MEDIA_NAMES.values(), ())]
            data = data.reading(dict.fromkeys((*self.form.columns, "id", "tools", *PASSENGER_KEYS, *media)))
        self.data = data
        if self.line:
            _LOG.info("%s: %s", self.name, self.line)

    def __len__(self) -> int:
        return len(self.data) if self.order is None else len(self.order)

    @property
    def block_ends(self) -> Order | None:
        """Return where records that are read together end; None where each is read by itself."""
        return getattr(self.data, "block_ends", None) if self.order is None else None

    def origin(self, index: int) -> str:
        """Return the place of a record, good or bad, with its own id if it can be read."""
        number = self._number(index)
        try:
            example = self.data.load(number)
        except UnreadableError:
            example = None
        return _origin(self.data.where(number), _own_id(example))

    def digest(self) -> str:
        """Return what changes with the file, its form (but not with where media lie) and the order of its records."""
        order = 0 if self.order is None else crc32c.crc32c(self.order.tobytes())
        return f"{self.name} {self.data.digest()} {order} {replace(self.form, media_dir=None)}"

    def _number(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of source '{self.name}', which has {len(self)}")
        return index if self.order is None else int(self.order[index])

    def read(self, index: int) -> Record:
        """Return one record; raise `BadSampleError` (under `raise`: `SourceError`) when it cannot be used."""
        number = self._number(index)
        where = self.data.where(number)
        try:
            example = self.data.load(number)
        except UnreadableError as error:
            apply_policy([], [Mismatch(error.reason, str(error))], self.on_mismatch, where)
            raise  # not reached: without a conversation every policy raises
        own_id = _own_id(example)
        origin = _origin(where, own_id)
        extras = convert_example(example, self.form, self.on_mismatch, origin)
        if empty := note_empty_media(example, self.form, extras["conversation"]):
            extras[MISMATCHES_KEY] = [*extras.get(MISMATCHES_KEY, ()), *empty]
        return Record(
            source=self.name,
            id=str(number) if own_id is None else own_id,
            has_id=own_id is not None,
            origin=origin,
            conversation=extras.pop("conversation"),
            media_root=self.form.media_dir,
            extras=extras,
        )


def _own_id(example: Any) -> str | None:
    own_id = example.get("id") if isinstance(example, dict) else None
    is_id = isinstance(own_id, (str, int)) and not isinstance(own_id, bool) and own_id != ""
    return str(own_id) if is_id else None


def _origin(where: str, own_id: str | None) -> str:
    return where if own_id is None else f"{where} (id {own_id})"


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
    except UnreadableError as error:
        detail = f"{data.where(number)}: {error}, so the file cannot be loaded whole. Mend or delete the record."
        raise BadSampleError("convert", error.reason, detail) from None
