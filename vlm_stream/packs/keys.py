"""Names of what an encoded sample holds: values along its tokens, and media."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import torch

__all__ = ["IGNORE", "MEDIA_KEYS", "TOKEN_KEYS", "Sample", "token_row"]

Sample: TypeAlias = Mapping[str, Any]

IGNORE: Final = -100
"""The label of a token that is not trained on."""

TOKEN_KEYS: Final = ("input_ids", "attention_mask", "labels", "mm_token_type_ids", "token_type_ids", "position_ids")
"""Values that run along the tokens; every other tensor of a sample belongs to its media."""

MEDIA_KEYS: Final = (
    "pixel_values",
    "image_grid_thw",
    "image_position_ids",
    "pixel_values_videos",
    "video_grid_thw",
    "second_per_grid_ts",
)
"""The media that packed samples always name, None where a pack has none."""


def token_row(sample: Sample, key: str) -> torch.Tensor | None:
    """Return a value along the tokens as `[length]`, whether it came with a batch axis or not."""
    value = sample.get(key)
    if value is None:
        return None
    row = torch.as_tensor(value)
    return row[0] if row.ndim == 2 else row
