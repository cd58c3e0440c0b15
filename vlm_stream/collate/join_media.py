"""Media of several rows become media of one batch.

Enters: dicts of tensors, one per row. Leaves: a dict with every media key joined along axis 0. Tensors that differ in
their other axes (tiles per image, frames of sound) are padded with zeros, as the processors themselves pad a batch;
lists of tensors stay lists. Knows no text and no family.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from vlm_stream.encode.labels import SEQUENCE_KEYS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["PIXEL_KEYS", "join_media", "join_parts", "media_keys"]

PIXEL_KEYS: Final = ("pixel_values", "pixel_values_videos")
_NOT_MEDIA: Final = frozenset(
    {*SEQUENCE_KEYS, "position_ids", "seq_lens", "seq_lens_padded", "n_images", "n_videos", "conversation"}
)


def media_keys(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys under which rows carry media, in the order in which they appear."""
    values = ((key, value) for row in rows for key, value in row.items() if key not in _NOT_MEDIA)
    return list(dict.fromkeys(key for key, value in values if isinstance(value, (torch.Tensor, list, tuple))))


def join_media(rows: Sequence[Mapping[str, Any]], *, pixel_dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Return the joined media of all rows; `pixel_dtype` converts `pixel_values` and `pixel_values_videos`."""
    batch = {}
    for key in media_keys(rows):
        parts = [row[key] for row in rows if row.get(key) is not None]
        joined = join_parts(parts)
        if pixel_dtype is not None and key in PIXEL_KEYS:
            joined = joined.to(pixel_dtype) if isinstance(joined, torch.Tensor) else [p.to(pixel_dtype) for p in joined]
        batch[key] = joined
    return batch


def join_parts(parts: Sequence[Any]) -> Any:
    """Join tensors along axis 0, lists of tensors into one flat list, lists of numbers into one tensor.

    Raises:
        TypeError: When some parts are tensors and others lists of tensors.
    """
    if all(isinstance(part, torch.Tensor) for part in parts):
        return _cat_padded(parts)
    lists = [part for part in parts if not isinstance(part, torch.Tensor)]
    if not any(isinstance(entry, torch.Tensor) for part in lists for entry in part):
        return _cat_padded([torch.as_tensor(part) for part in parts])
    if len(lists) < len(parts):
        raise TypeError("Some rows hold pixels as one tensor and others as a list of tensors; they cannot be joined.")
    return [entry for part in parts for entry in part]


def _cat_padded(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    if len(parts) == 1:
        return parts[0]
    if len({part.shape[1:] for part in parts}) == 1:
        return torch.cat(list(parts), dim=0)
    largest = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
    out = parts[0].new_zeros((sum(len(part) for part in parts), *largest))
    begin = 0
    for part in parts:
        place = (slice(begin, begin + len(part)), *(slice(0, size) for size in part.shape[1:]))
        out[place] = part
        begin += len(part)
    return out
