"""Samples that are encoded already: pad, join, shift.

Enters: what `Encoder.encode` gives (or the pre-tokenising wrapper). Leaves: a batch with shifted labels, pixels in
bfloat16, media counts per row. Fake images were masked when the sample was encoded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from vlm_stream.collate.join_media import join_media
from vlm_stream.collate.rows import cut_rows, pad_id_of, pad_rows, pad_to, shift

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["pad_collate_fn"]


def pad_collate_fn(
    examples: Sequence[Mapping[str, Any]], processor: Any, max_length: int | None = None
) -> dict[str, Any]:
    """Collate encoded samples.

    Args:
        examples: Dicts of tensors; per-token tensors [S] (or [1, S]), media as the processor gave them.
        processor: For its padding token and media tokens.
        max_length: Every batch gets this many tokens before the shift; longer rows are cut, never through media.

    Returns:
        Per-token tensors [B, S - 1] with shifted labels, every media key of the samples (`second_per_grid_ts` too),
        `n_images_per_sample` and `n_videos_per_sample` where grids exist.

    Raises:
        BadSampleError: When the cut would take media tokens away.
    """
    pad_id = pad_id_of(processor)
    batch: dict[str, Any] = dict(pad_rows(examples, pad_id=pad_id))
    if max_length is not None:
        batch = pad_to(cut_rows(batch, max_length, processor), max_length, pad_id)
    return shift(batch) | join_media(examples, pixel_dtype=torch.bfloat16) | _grid_counts(examples)


def _grid_counts(examples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    grids = {"n_images_per_sample": "image_grid_thw", "n_videos_per_sample": "video_grid_thw"}
    if not any(example.get(key) is not None for example in examples for key in grids.values()):
        return {}
    counts = {
        name: torch.tensor([0 if e.get(key) is None else len(e[key]) for e in examples], dtype=torch.int64)
        for name, key in grids.items()
    }
    return {name: value for name, value in counts.items() if bool(value.any())}
