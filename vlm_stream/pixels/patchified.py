"""Families whose pixels are rows of patches: Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3-Omni, GLM-4.6V.

A row is [channels, temporal patch, patch, patch], flat. A still image fills the temporal patch with copies of itself,
which are left out here; the frames of a video differ, so its rows are whole.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch

from vlm_stream.pixels.part_twin import PartTwin

__all__ = ["PATCHIFIED_PARTS", "cut_patches"]


class _Images(PartTwin):
    _layout = "patches"

    def patchify(self, images: torch.Tensor, patch_size: int, merge_size: int, temporal_patch_size: int) -> Any:
        """Cut patches of one copy, and note how many there were to be."""
        if self._undone.spec is not None:
            self._undone.spec = replace(self._undone.spec, repeat=temporal_patch_size)
        grid = images.shape[-2] // patch_size, images.shape[-1] // patch_size
        return cut_patches(images, patch_size, merge_size), *grid


class _Videos(PartTwin):
    _layout = "patches"


def cut_patches(images: torch.Tensor, patch_size: int, merge_size: int) -> torch.Tensor:
    """Return [images, patches, channels * patch * patch] of bytes [images, channels, height, width].

    Patches that the model merges follow each other. A line of a patch is moved as one value: byte by byte, as the
    library does it, takes two and a half times as long.
    """
    num_images, num_channels, height, width = images.shape
    rows, columns = height // patch_size // merge_size, width // patch_size // merge_size
    lines = images.contiguous().numpy().view(np.dtype((np.void, patch_size)))  # [images, channels, height, columns]
    lines = lines.reshape(num_images, num_channels, rows, merge_size, patch_size, columns, merge_size)
    patches = np.ascontiguousarray(lines.transpose(0, 2, 5, 3, 6, 1, 4))
    return torch.from_numpy(patches.view(np.uint8).reshape(num_images, -1, num_channels * patch_size**2))


PATCHIFIED_PARTS: Final[dict[str, type[PartTwin]]] = {
    "Glm46VImageProcessor": _Images,
    "Glm46VVideoProcessor": _Videos,
    "Qwen2VLImageProcessor": _Images,
    "Qwen2VLVideoProcessor": _Videos,
    "Qwen3VLVideoProcessor": _Videos,
}
"""Class of a processor's part -> what its twin does differently."""
