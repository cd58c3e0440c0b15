"""Media of several rows become media of one batch: tensors are joined, lists of tensors stay lists.

Enters: dicts of tensors, one per row. Leaves: a dict with the joined media and the counts per row. Knows no text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["JOINED_KEYS", "PIXEL_KEYS", "join_media", "join_pixels"]

PIXEL_KEYS: Final = ("pixel_values", "pixel_values_videos")
JOINED_KEYS: Final = ("image_grid_thw", "image_position_ids", "video_grid_thw", "second_per_grid_ts")


def join_pixels(parts: Sequence[Any], dtype: torch.dtype | None = None) -> Any:
    """Join the pixels of several rows: tensors along axis 0, lists into one flat list; `dtype` converts them.

    Raises:
        TypeError: When some rows hold tensors and others lists.
    """
    are_tensors = [isinstance(part, torch.Tensor) for part in parts]
    if all(are_tensors):
        joined = torch.cat(list(parts), dim=0) if len(parts) > 1 else parts[0]
        return joined.to(dtype) if dtype is not None else joined
    if any(are_tensors):
        raise TypeError("Some rows hold pixels as one tensor and others as a list of tensors; they cannot be joined.")
    flat = [pixels for part in parts for pixels in part]
    return [pixels.to(dtype) for pixels in flat] if dtype is not None else flat


def join_media(
    rows: Sequence[Mapping[str, Any]], *, pixel_dtype: torch.dtype | None = None, keys: Sequence[str] = JOINED_KEYS
) -> dict[str, Any]:
    """Return the joined media of all rows; keys that no row has are left out."""
    batch: dict[str, Any] = {}
    for key in PIXEL_KEYS:
        parts = [row[key] for row in rows if row.get(key) is not None]
        if parts:
            batch[key] = join_pixels(parts, pixel_dtype)
    for key in keys:
        parts = [torch.as_tensor(row[key]) for row in rows if row.get(key) is not None]
        if parts:
            batch[key] = torch.cat(parts, dim=0)
    return batch
