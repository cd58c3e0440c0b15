"""What numbers and texts a manifest and an index may hold: they come from whoever made the dataset.

Enters: columns of a manifest, columns of an index. Leaves: nothing, or a `TypeError` or `ValueError` that names the
value. Memory is taken and bytes are asked for by these numbers, so they are checked before anything is done with them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy.typing as npt

    Numbers = npt.NDArray[Any]

_MOST_OF_SHARD: Final = {"samples": 1 << 26, "crc32c": (1 << 32) - 1, "bytes": 1 << 46}
_MOST_ELSE: Final = 1 << 50
"""Of any other count of a shard: sums over all shards stay numbers of 64 bits."""
OUTSIDE: Final = -1
"""Place of a member that is a file of its own, not in the shard; its name is its URL."""
_HEADER_BYTES: Final = 512
"""A sample in a tar takes no less."""
MOST_OF_MEDIUM: Final = {
    "height": 1 << 20,
    "width": 1 << 20,
    "frames": 1 << 24,
    "picked": 1 << 24,
    "gops": 1 << 24,
    "samples": 1 << 40,
    "rate": 1 << 24,
    "fps": 1e6,
    "seconds": 1e9,
}
"""Lengths in tokens and costs are products of these, which must stay numbers of 64 bits."""


def check_texts(values: Iterable[object]) -> None:
    """Raise where one is no text."""
    for value in values:
        if type(value) is not str:
            raise TypeError(f"{value!r:.80} is no text")


def check_columns(columns: Mapping[str, list[Any]], entries: Mapping[str, list[Any]]) -> None:
    """Raise where the columns of the shards hold what no shard has.

    Args:
        columns: Name, checksums, etag and totals of each shard.
        entries: Samples of each shard, by the entry they came from.
    """
    for name in ("name", "index_sha256"):
        check_texts(columns[name])
    check_texts(value for value in columns["etag"] if value is not None)
    counts = {name: values for name, values in columns.items() if name not in ("name", "index_sha256", "etag")}
    for name, values in [*counts.items(), *(("entries", each) for each in entries.values())]:
        check_counts(name, values, _MOST_OF_SHARD.get(name, _MOST_ELSE))
    for samples, size in zip(columns["samples"], columns["bytes"], strict=True):
        if samples * _HEADER_BYTES > size:
            raise ValueError(f"{samples} samples in a tar of {size} bytes")


def check_counts(name: str, values: Iterable[Any], most: int = _MOST_ELSE) -> None:
    """Raise where one is no number between 0 and the most."""
    kinds = (int, float) if name.endswith("_seconds") else (int,)
    for value in values:
        if type(value) not in kinds or not 0 <= value <= most:
            raise ValueError(f"{name} is {value!r:.80}")


def check_media(counts: Sequence[Numbers], media: Mapping[str, Mapping[str, Numbers]]) -> None:
    """Raise where the columns of an index that plans need hold what no sample has.

    Args:
        counts: [n] Text tokens, and label tokens, which are -1 where they are not known.
        media: Fields of the items of each kind.
    """
    text, labels = counts
    check_range("text_tokens", text, 0, (1 << 31) - 1)
    check_range("label_tokens", labels, -1, (1 << 31) - 1)
    for fields in media.values():
        for name, values in fields.items():
            most = MOST_OF_MEDIUM[name]
            check_range(name, values, -most if name == "gops" else 0, most)  # below 0: those of a part of a clip


def check_places(
    offset: Numbers, size: Numbers, members: tuple[Numbers, Numbers, Numbers], shard_bytes: int | None
) -> None:
    """Raise where samples lie outside of their shard, or members neither in their sample nor in another one.

    Args:
        offset: [n] First byte of each sample.
        size: [n] Its bytes.
        members: [n + 1] splits; [members] first byte in the shard, or `OUTSIDE` of it; their sizes.
        shard_bytes: Size of the shard; None: not known.
    """
    most = _MOST_OF_SHARD["bytes"] if shard_bytes is None else shard_bytes
    check_range("offset", offset, 0, most)
    check_range("size", size, 0, most)
    check_range("the end of a sample", offset.astype(np.int64) + size, 0, most)
    splits, begins, sizes = members
    check_range("size of a member", sizes, 0, _MOST_OF_SHARD["bytes"])
    ends = offset.astype(np.int64) + size
    own_begins, own_ends = (np.repeat(values, np.diff(splits)) for values in (offset, ends))
    is_elsewhere = ((begins < own_begins) | (begins + sizes > own_ends)) & (begins != OUTSIDE)
    if not is_elsewhere.any():
        return
    begins, sizes = begins[is_elsewhere], sizes[is_elsewhere]
    owners = np.searchsorted(offset, begins, side="right") - 1  # [members elsewhere] -1: before the first sample
    is_in = (owners >= 0) & (begins >= offset[owners]) & (begins + sizes <= ends[owners])
    if not is_in.all():
        wrong = int(np.argmin(is_in))
        raise ValueError(f"a member of {sizes[wrong]} bytes at {begins[wrong]} lies in no sample")


def check_range(name: str, values: Numbers, least: float, most: float) -> None:
    """Raise where one of some numbers is not between the least and the most."""
    # "not": nothing is between others and a number that is none.
    if len(values) and not (least <= values.min() and values.max() <= most):
        raise ValueError(f"{name} is between {values.min()} and {values.max()}, not between {least} and {most}")
