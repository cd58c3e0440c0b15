"""Families whose pixels are whole images or crops: InternVL, Gemma-3. Only rescaling and normalising is left undone.

Families that fill batches with black crops behind their own normalising (LLaVA-OneVision) do not belong here: a black
crop of bytes would come out as normalised black instead of zero.
"""

from __future__ import annotations

from typing import Final

from vlm_stream.pixels.part_twin import PartTwin

__all__ = ["CROP_PARTS"]


class _Planes(PartTwin):
    _layout = "planes"


CROP_PARTS: Final[dict[str, type[PartTwin]]] = {
    "Gemma3ImageProcessor": _Planes,
    "GotOcr2ImageProcessor": _Planes,
    "InternVLVideoProcessor": _Planes,
}
"""Class of a processor's part -> what its twin does differently."""
