"""A uint8 copy of one part of a processor: it resizes as the original does and stops before rescaling and normalising.

Enters: an image or video processor of transformers (torchvision backend). Leaves: an object of a subclass that shares
the original's settings, whatever they are set to later; and a note of what it left undone, taken from the arguments of
the step itself. So no parameter is written down twice, and options of a single call count as well.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import torch

from vlm_stream.pixels.spec import PartSpec

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["CROP_PARTS", "PATCHIFIED_PARTS", "Uint8Part", "Undone", "cut_patches", "make_uint8_part", "view_image"]

_CHANNELS: Final = 3


@dataclass(slots=True)
class Undone:
    """What the last call of a uint8 part left undone."""

    spec: PartSpec | None = None


class Uint8Part:
    """Steps that replace those of the original; mixed in before its class."""

    _undone: Undone
    _layout: Literal["patches", "planes"] = "planes"

    def process_image(self, image: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """View the image's memory; what is no RGB image goes the original's way."""
        if getattr(image, "mode", None) == "RGB" and hasattr(image, "tobytes"):
            return view_image(image)
        converted: torch.Tensor = super().process_image(image, *args, **kwargs)  # type: ignore[misc]
        return converted

    def _prepare_input_videos(self, videos: Any, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        views = [_view_frames(video) for video in videos]
        if all(view is not None for view in views):
            return [view for view in views if view is not None]
        prepared: list[torch.Tensor] = super()._prepare_input_videos(videos, *args, **kwargs)  # type: ignore[misc]
        return prepared

    def rescale_and_normalize(
        self,
        images: torch.Tensor,
        do_rescale: bool,
        rescale_factor: float,
        do_normalize: bool,
        image_mean: Any,
        image_std: Any,
    ) -> torch.Tensor:
        """Leave the bytes as they are, without the fourth channel of views, and note what was to be done."""
        # Computed as the original computes it, in float32: finished pixels then come out the same.
        unit = 1.0 / rescale_factor if do_rescale else 1.0
        mean = torch.tensor(_per_channel(image_mean) if do_normalize else (0.0,) * _CHANNELS) * unit
        std = torch.tensor(_per_channel(image_std) if do_normalize else (1.0,) * _CHANNELS) * unit
        self._undone.spec = PartSpec(layout=self._layout, repeat=1, mean=tuple(mean.tolist()), std=tuple(std.tolist()))
        colours = images[..., :_CHANNELS, :, :]
        return colours if self._layout == "patches" else colours.contiguous()


def make_uint8_part(part: Any, mixin: type[Uint8Part], undone: Undone) -> Any:
    """Return the uint8 copy of a part; its calls keep `undone` up to date."""
    kind = type(f"Compact{type(part).__name__}", (mixin, type(part)), {"_undone": undone})
    copied: Any = object.__new__(kind)
    copied.__dict__ = part.__dict__  # shared: a setting that is changed later holds for both
    return copied


def _per_channel(value: Any) -> tuple[float, ...]:
    return (float(value),) * _CHANNELS if isinstance(value, (int, float)) else tuple(float(one) for one in value)


def view_image(image: Image.Image) -> torch.Tensor:
    """Return the memory of an RGB image as [4 or 3, height, width] uint8; only the first three channels are colours.

    Pillow keeps RGB in four bytes a pixel and hands that memory out by the Arrow interface. It is also the layout that
    torch's resize of bytes works in, so the fourth channel saves a copy on each side.
    """
    width, height = image.size
    if hasattr(image, "__arrow_c_array__"):  # Pillow 11.2
        import pyarrow as pa
        from torch.utils.dlpack import from_dlpack

        try:
            return from_dlpack(pa.array(image).values).view(height, width, 4).permute(2, 0, 1)
        except ValueError:  # Pillow keeps an image above 16 MB in several blocks
            pass
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def _view_frames(frames: Any) -> torch.Tensor | None:
    """Return frames [n, height, width, 3] uint8 as [n, 3, height, width]; None for anything else."""
    is_plain = isinstance(frames, np.ndarray) and frames.dtype == np.uint8 and frames.ndim == 4
    if not is_plain or frames.shape[-1] != 3 or frames.shape[1] in (1, 3):
        return None
    return torch.from_numpy(frames).permute(0, 3, 1, 2)


class _PatchImages(Uint8Part):
    """Flat rows [channels, 1, patch, patch]: without the copies that fill a still image's temporal patch."""

    _layout = "patches"

    def patchify(self, images: torch.Tensor, patch_size: int, merge_size: int, temporal_patch_size: int) -> Any:
        """Cut patches of one copy, and note how many there were to be."""
        if self._undone.spec is not None:
            self._undone.spec = replace(self._undone.spec, repeat=temporal_patch_size)
        grid = images.shape[-2] // patch_size, images.shape[-1] // patch_size
        return cut_patches(images, patch_size, merge_size), *grid


class _PatchVideos(Uint8Part):
    """Rows of patches, whole: the frames of a video differ."""

    _layout = "patches"


def cut_patches(images: torch.Tensor, patch_size: int, merge_size: int) -> torch.Tensor:
    """Return [images, patches, channels * patch * patch] of bytes [images, channels, height, width].

    Patches that the model merges follow each other. A line of a patch is moved as one value, not byte by byte.
    """
    num_images, num_channels, height, width = images.shape
    rows, columns = height // patch_size // merge_size, width // patch_size // merge_size
    lines = images.contiguous().numpy().view(np.dtype((np.void, patch_size)))  # [images, channels, height, columns]
    lines = lines.reshape(num_images, num_channels, rows, merge_size, patch_size, columns, merge_size)
    patches = np.ascontiguousarray(lines.transpose(0, 2, 5, 3, 6, 1, 4))
    return torch.from_numpy(patches.view(np.uint8).reshape(num_images, -1, num_channels * patch_size**2))


PATCHIFIED_PARTS: Final[dict[str, type[Uint8Part]]] = {
    "Glm46VImageProcessor": _PatchImages,
    "Glm46VVideoProcessor": _PatchVideos,
    "Qwen2VLImageProcessor": _PatchImages,
    "Qwen2VLVideoProcessor": _PatchVideos,
    "Qwen3VLVideoProcessor": _PatchVideos,
}
"""Parts of Qwen2-VL to Qwen3-VL, Qwen3-Omni and GLM-4.6V, whose pixels are rows of patches."""


class _Planes(Uint8Part):
    _layout = "planes"


CROP_PARTS: Final[dict[str, type[Uint8Part]]] = {
    "Gemma3ImageProcessor": _Planes,
    "GotOcr2ImageProcessor": _Planes,
    "InternVLVideoProcessor": _Planes,
}
"""Parts of InternVL and Gemma-3, whose pixels are whole images or crops.

Families that fill batches with black crops after their own normalising (LLaVA-OneVision) do not belong here: a black
crop of bytes would come out as normalised black instead of zero.
"""
