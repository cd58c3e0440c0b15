"""Families whose pixels are rows of patches: Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3-Omni, GLM-4.6V.

A row is [channels, temporal patch, patch, patch], flat. A still image fills the temporal patch with copies of itself,
which are left out here; the frames of a video differ, so its rows are whole.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from vlm_stream.pixels.part_twin import PartTwin

if TYPE_CHECKING:
    import torch

__all__ = ["PATCHIFIED_PARTS"]


class _Images(PartTwin):
    _layout = "patches"

    def patchify(self, images: torch.Tensor, patch_size: int, merge_size: int, temporal_patch_size: int) -> Any:
        """Cut patches of one copy, and note how many there were to be."""
        if self._undone.spec is not None:
            self._undone.spec = replace(self._undone.spec, repeat=temporal_patch_size)
        return super().patchify(  # type: ignore[misc]
            images, patch_size=patch_size, merge_size=merge_size, temporal_patch_size=1
        )


class _Videos(PartTwin):
    _layout = "patches"


PATCHIFIED_PARTS: Final[dict[str, type[PartTwin]]] = {
    "Glm46VImageProcessor": _Images,
    "Glm46VVideoProcessor": _Videos,
    "Qwen2VLImageProcessor": _Images,
    "Qwen2VLVideoProcessor": _Videos,
    "Qwen3VLVideoProcessor": _Videos,
}
"""Class of a processor's part -> what its twin does differently."""
