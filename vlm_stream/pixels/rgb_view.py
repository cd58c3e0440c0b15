"""The memory of an RGB image as a tensor, without a copy where Pillow allows it.

Pillow keeps RGB in four bytes a pixel and hands that memory out by the Arrow interface. It is also the layout that
torch's resize of bytes works in, so the fourth channel costs nothing and saves a copy on each side.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["view_frames", "view_image"]


def view_image(image: Image.Image) -> torch.Tensor:
    """Return [4 or 3, height, width] uint8; only the first three channels are colours. The image must be RGB."""
    width, height = image.size
    if hasattr(image, "__arrow_c_array__"):  # Pillow 11.2
        import pyarrow as pa
        from torch.utils.dlpack import from_dlpack

        try:
            return from_dlpack(pa.array(image).values).view(height, width, 4).permute(2, 0, 1)
        except ValueError:  # Pillow keeps an image above 16 MB in several blocks
            pass
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def view_frames(frames: Any) -> torch.Tensor | None:
    """Return frames [n, height, width, 3] uint8 as [n, 3, height, width]; None for anything else."""
    is_plain = isinstance(frames, np.ndarray) and frames.dtype == np.uint8 and frames.ndim == 4
    if not is_plain or frames.shape[-1] != 3 or frames.shape[1] in (1, 3):
        return None
    return torch.from_numpy(frames).permute(0, 3, 1, 2)
