"""Media of several rows become media of one batch.

Enters: dicts of tensors, one per row. Leaves: a dict with every media key joined along axis 0, as packs join theirs;
here pixels may change their type, and clips get the mask of their lengths. Knows no text and no family.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from vlm_stream.keys import TOKEN_KEYS as SEQUENCE_KEYS
from vlm_stream.packs.media import join_rows
from vlm_stream.pixels import PIXELS_KEY, carry_spec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["PIXEL_KEYS", "join_media", "media_keys"]

PIXEL_KEYS: Final = ("pixel_values", "pixel_values_videos")
_MASK_OF: Final = {"audio_input_features": "audio_attention_mask"}
"""Phi-4 gives a mask of frames only with batches of several clips, so single samples come without one."""
_NOT_MEDIA: Final = frozenset(
    {*SEQUENCE_KEYS, "position_ids", "seq_lens", "seq_lens_padded", "n_images", "n_videos", "conversation"}
)


def media_keys(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys under which rows carry media, in the order in which they appear."""
    values = ((key, value) for row in rows for key, value in row.items() if key not in _NOT_MEDIA)
    return list(dict.fromkeys(key for key, value in values if not key.startswith("_") and _is_media(value)))


def _is_media(value: Any) -> bool:
    """Say whether a value can be joined: a tensor, or a list of tensors or numbers; names and notes are not media."""
    if isinstance(value, torch.Tensor):
        return value.ndim > 0
    is_list = isinstance(value, (list, tuple)) and len(value) > 0
    return is_list and all(isinstance(entry, (torch.Tensor, int, float)) for entry in value)


def join_media(rows: Sequence[Mapping[str, Any]], *, pixel_dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Return the joined media of all rows; `pixel_dtype` converts `pixel_values` and `pixel_values_videos`.

    Compact pixels stay bytes, and the batch says so.
    """
    batch: dict[str, Any] = dict(carry_spec(rows))
    for key in media_keys(rows):
        parts = [row[key] for row in rows if row.get(key) is not None]
        is_finished = key in PIXEL_KEYS and PIXELS_KEY not in batch
        batch[key] = join_rows(key, parts, pixel_dtype if is_finished else None)
        mask = _MASK_OF.get(key)
        if mask is not None and len(parts) > 1 and not any(mask in row for row in rows):
            batch[mask] = _length_mask(parts)
    return batch


def _length_mask(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return [n, longest] bool: true where a joined clip has frames of its own."""
    lengths = torch.tensor([part.shape[1] for part in parts for _ in range(len(part))])
    return torch.arange(int(lengths.max())) < lengths[:, None]
