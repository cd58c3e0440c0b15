"""HF datasets: rows by number, with a rule that makes a conversation of each. Only this file imports `datasets`.

`source[i]` is `{"conversation": ...}` with images decoded, for training in memory. `source.read(i)` is the `Record`,
whose media items hold the stored bytes, for shards. Nothing is read before it is asked for.
"""

import io
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from vlm_stream.conversation import Item, map_media
from vlm_stream.errors import BadSampleError, SourceError, nearest_name, require
from vlm_stream.keys import IMAGE_FORMATS
from vlm_stream.sources.record import Record
from vlm_stream.sources.sharegpt import MISMATCHES_KEY, PASSENGER_KEYS

_LOG = logging.getLogger(__name__)
_RECORD_KEYS: Final = (*PASSENGER_KEYS, MISMATCHES_KEY)


class Rows(Protocol):
    """What is needed of a dataset: rows by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Mapping[str, Any]: ...


def load_rows(
    path_or_dataset: Any, split: str, columns: Sequence[str], *, limit: int | None = None, ignored: Sequence[str] = ()
) -> Rows:
    """Return the rows of a dataset: a hub id, a folder, a `Dataset`, a `DatasetDict` or a list of dicts.

    `columns` must be there. `ignored` are options that the caller was given and has no use for; the log names them.
    """
    if ignored:
        _LOG.warning("no dataset factory has a use for %s", ", ".join(sorted(ignored)))
    rows = path_or_dataset
    if isinstance(rows, (str, Path)):
        rows = _load(str(rows), split)
    if _library_class(rows, "DatasetDict"):
        if split not in rows:
            raise SourceError(f"the dataset has no split '{split}', so there are no rows; {nearest_name(split, rows)}")
        rows = rows[split]
    if not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__"):
        raise SourceError(
            f"a {type(rows).__name__} gives its rows in one order only, and records are read by number; "
            "load the dataset without streaming."
        )
    _check_columns(rows, columns)
    rows = _undecoded(rows)
    if limit is None or limit >= len(rows):
        return rows  # type: ignore[no-any-return]
    if limit < 0:
        raise SourceError(f"a limit of {limit} rows cannot be kept; give 0 or more, or leave it out.")
    selected: Rows = rows.select(range(limit)) if hasattr(rows, "select") else rows[:limit]
    return selected


def interleave(sizes: Sequence[int], probabilities: Sequence[float], seed: int) -> npt.NDArray[np.int64]:
    """Return [n, 2] source and row of a random mixture that ends once every source was seen whole; others repeat."""
    datasets = require("datasets", "hf", "Reading HF datasets")
    parts = [datasets.Dataset.from_dict({"row": range(size), "source": [i] * size}) for i, size in enumerate(sizes)]
    mixed = datasets.interleave_datasets(
        parts, probabilities=list(probabilities), seed=seed, stopping_strategy="all_exhausted"
    )
    columns = mixed.with_format("numpy")[:]
    return np.stack([columns["source"], columns["row"]], axis=1)


def _library_class(value: object, name: str) -> bool:
    """Tell whether the value is of that class of the library, without importing it."""
    return any(base.__name__ == name and base.__module__.startswith("datasets") for base in type(value).__mro__)


def _load(path: str, split: str) -> Any:
    datasets = require("datasets", "hf", "Reading HF datasets")
    try:
        if any(Path(path, mark).is_file() for mark in ("state.json", "dataset_dict.json")):
            return datasets.load_from_disk(path)
        return datasets.load_dataset(path, split=split)
    except (OSError, ValueError) as error:  # the library's own errors are kinds of these
        raise SourceError(
            f"the dataset '{path}' (split '{split}') cannot be loaded ({error}), so it has no rows. "
            "Check its name and split, or give a local folder or a loaded Dataset."
        ) from error


def _check_columns(rows: Any, columns: Sequence[str]) -> None:
    found = getattr(rows, "column_names", None)
    if found is None:
        found = list(rows[0]) if len(rows) else columns
    for column in columns:
        if column not in found:
            raise SourceError(
                f"the dataset has no column '{column}', so its rows do not fit this factory; "
                f"{nearest_name(column, found)}"
            )


def _undecoded(rows: Any) -> Any:
    """Leave images and audio as the bytes they are stored as: shards copy them."""
    for column, feature in (getattr(rows, "features", None) or {}).items():
        inner: Any = getattr(feature, "feature", None)  # of a list of media
        if _is_medium(feature):
            rows = rows.cast_column(column, type(feature)(decode=False))
        elif _is_medium(inner):
            rows = rows.cast_column(column, type(feature)(type(inner)(decode=False)))
    return rows


def _is_medium(feature: object) -> bool:
    return any(_library_class(feature, name) for name in ("Image", "Audio", "Video"))


class HFSource(Sequence[dict[str, Any]]):
    """Examples by number. Picklable as long as its rows are; the rules are functions of a module."""

    def __init__(
        self,
        rows: Rows,
        *,
        name: str,
        convert: Callable[[Mapping[str, Any], int], dict[str, Any]],
        finish: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
        line: str = "",
    ) -> None:
        """Read rows, whose media are undecoded, through `convert`; `line` says for people what was recognised.

        `convert` makes `{"conversation": ..., extras}` of a row and its number, or raises `BadSampleError` or
        `ValueError`. `finish` is what `source[i]` does to that; by default images are decoded.
        """
        self.rows = rows
        self.name = name
        self.line = line
        self._convert = convert
        self._finish = finish or decode_images

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number = int(index) + (len(self) if index < 0 else 0)
        example = self._example(number)
        try:
            return self._finish(example)
        except (OSError, ValueError) as error:
            raise self._bad(number, "unreadable_media", f"a medium cannot be decoded ({error})") from error

    def read(self, index: int) -> Record:
        """Return one record, its media as stored; raise `BadSampleError` when the row does not map."""
        example = self._example(index)
        return Record(
            source=self.name,
            id=str(index),
            has_id=False,
            origin=f"{self.name}:{index}",
            conversation=map_media(example["conversation"], _stored_item),
            extras={key: example[key] for key in _RECORD_KEYS if key in example},
        )

    def _example(self, number: int) -> dict[str, Any]:
        if not 0 <= number < len(self):
            raise IndexError(f"row {number} of source '{self.name}', which has {len(self)}")
        try:
            return self._convert(self.rows[number], number)
        except BadSampleError as error:
            raise self._bad(number, error.reason, str(error)) from None
        except KeyError as error:
            raise self._bad(number, "bad_row", f"the row has no column {error}") from None
        except ValueError as error:
            raise self._bad(number, "bad_row", str(error)) from None

    def _bad(self, number: int, reason: str, fact: str) -> BadSampleError:
        tail = "" if fact.endswith(".") else ". The sample is left out; mend the row or leave it out."
        return BadSampleError("convert", reason, f"{self.name}:{number}: {fact}{tail}")


class MixedSource(Sequence[dict[str, Any]]):
    """Several such sources as one, in a given order: [n, 2] source and row; rows may occur more than once."""

    def __init__(self, sources: Sequence[HFSource], order: npt.NDArray[np.int64], *, name: str) -> None:
        self.name = name
        self.sources = tuple(sources)
        self.order = order

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        source, row = map(int, self.order[index])
        return self.sources[source][row]

    def read(self, index: int) -> Record:
        """Return one record; raise `BadSampleError` when it cannot be mapped."""
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of source '{self.name}', which has {len(self)}")
        source, row = map(int, self.order[index])
        return self.sources[source].read(row)


def turn(role: str, *items: Item) -> dict[str, Any]:
    return {"role": role, "content": list(items)}


def text_item(text: object) -> Item:
    """Return a text item; a null is no text."""
    if not isinstance(text, str):
        raise BadSampleError("convert", "content_not_text", f"a text column holds {text!r}, not text")
    return {"type": "text", "text": text}


def media_item(medium: str, value: Any) -> Item:
    """Return a media item for what a column holds: `{"bytes", "path"}`, bytes, a path or a decoded object."""
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if value is None or value in ("", b""):
        raise BadSampleError("convert", "null_media", f"the {medium} column is empty")
    return {"type": medium, medium: value}


def decode_images(example: dict[str, Any]) -> dict[str, Any]:
    """Return the example with PIL images in the places of bytes and paths."""
    from PIL import Image

    opened: dict[int, Any] = {}  # the same bytes twice are the same image

    def decode(item: Item) -> Item:
        where = item.get("image") if item.get("type") == "image" else None
        if not isinstance(where, (bytes, str)):
            return item
        if id(where) not in opened:
            Image.init()
            source: Any = io.BytesIO(where) if isinstance(where, bytes) else where
            image = Image.open(source, formats=[name for name in IMAGE_FORMATS if name in Image.OPEN])
            image.load()
            opened[id(where)] = image
        return {**item, "image": opened[id(where)]}

    return {**example, "conversation": map_media(example["conversation"], decode)}


def mono_samples(where: bytes | str, new_rate: int) -> npt.NDArray[np.float32]:
    soundfile = require("soundfile", "audio", "Decoding audio")
    try:
        samples, rate = soundfile.read(io.BytesIO(where) if isinstance(where, bytes) else where, dtype="float32")
    except soundfile.SoundFileError as error:
        raise ValueError(str(error)) from None
    mono = samples if samples.ndim == 1 else samples.mean(axis=1)
    return resample(mono, int(rate), new_rate)


def resample(samples: npt.NDArray[np.float32], rate: int, new_rate: int) -> npt.NDArray[np.float32]:
    """Return the clip at another rate, as decoding for training resamples it."""
    if rate == new_rate:
        return samples
    soxr = require("soxr", "audio", f"Resampling audio from {rate} to {new_rate} Hz")
    resampled: npt.NDArray[np.float32] = soxr.resample(samples, rate, new_rate)
    return resampled


def _stored_item(item: Item) -> Item:
    """Return an item whose decoded image is written as PNG: such rows never had bytes to copy."""
    medium = item["type"]
    if isinstance(item[medium], (bytes, str, list)) or not hasattr(item[medium], "save"):
        return item
    out = io.BytesIO()
    item[medium].save(out, format="PNG")
    return {**item, medium: out.getvalue()}
