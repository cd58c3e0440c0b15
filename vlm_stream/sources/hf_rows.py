"""Rows of an HF dataset by number, with media left undecoded. The only file that imports the `datasets` library."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from vlm_stream.errors import MissingExtraError, SourceError, nearest_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

__all__ = ["Rows", "interleave", "load_rows"]

_LOG = logging.getLogger(__name__)


class Rows(Protocol):
    """What is needed of a dataset: rows by number."""

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """Return one row by column."""
        ...


def load_rows(
    path_or_dataset: Any, split: str, columns: Sequence[str], *, limit: int | None = None, ignored: Sequence[str] = ()
) -> Rows:
    """Return the rows of a dataset: a hub id, a folder, a `Dataset`, a `DatasetDict` or a list of dicts.

    Args:
        path_or_dataset: Where the rows are.
        split: Which split, where there are several.
        columns: Columns that must be there.
        limit: No more rows than this.
        ignored: Options that the caller was given and has no use for; they are named in the log.
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
    datasets = _library()
    parts = [datasets.Dataset.from_dict({"row": range(size), "source": [i] * size}) for i, size in enumerate(sizes)]
    mixed = datasets.interleave_datasets(
        parts, probabilities=list(probabilities), seed=seed, stopping_strategy="all_exhausted"
    )
    columns = mixed.with_format("numpy")[:]
    return np.stack([columns["source"], columns["row"]], axis=1)


def _library() -> Any:
    try:
        import datasets
    except ImportError:
        raise MissingExtraError("datasets", "hf", "Reading HF datasets") from None
    return datasets


def _library_class(value: object, name: str) -> bool:
    """Tell whether the value is of that class of the library, without importing it."""
    return any(base.__name__ == name and base.__module__.startswith("datasets") for base in type(value).__mro__)


def _load(path: str, split: str) -> Any:
    datasets = _library()
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
    """Leave images and audio as the bytes they are stored as: shards copy them, and nobody else needs them all."""
    for column, feature in (getattr(rows, "features", None) or {}).items():
        inner: Any = getattr(feature, "feature", None)  # of a list of media
        if _is_medium(feature):
            rows = rows.cast_column(column, type(feature)(decode=False))
        elif _is_medium(inner):
            rows = rows.cast_column(column, type(feature)(type(inner)(decode=False)))
    return rows


def _is_medium(feature: object) -> bool:
    return any(_library_class(feature, name) for name in ("Image", "Audio", "Video"))
