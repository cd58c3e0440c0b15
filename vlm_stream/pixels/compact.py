"""`CompactPath`: a processor that gives compact pixels, or the reason why there is none.

Enters: a processor (torchvision backend). Leaves: a copy with the same text part, whose image and video parts resize as
the originals do and stop before rescaling and normalising. Ids, grids and every parameter come from the processor's own
code: a part's copy shares the original's settings, whatever they are set to later, and notes what it left undone from
the arguments of the step itself, so options of a single call count as well. Whether finished pixels equal the
processor's is tried on a few small media first, so a step that is not known here refuses the path.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import torch

from vlm_stream.errors import ConfigError
from vlm_stream.keys import PIXEL_KEYS, PIXEL_SPEC_KEY
from vlm_stream.pixels.finish import PartSpec, PixelSpec, finish_tensor
from vlm_stream.tokens import Processor, read_family

if TYPE_CHECKING:
    from PIL import Image


logger = logging.getLogger(__name__)

_TOLERANCE: Final = 1e-6
_PART_NAMES: Final = ("image_processor", "video_processor")
_KNOWN_STEPS: Final = frozenset(
    {"do_resize", "do_rescale", "do_normalize", "do_convert_rgb", "do_sample_frames", "do_pan_and_scan"}
)
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
        means = _per_channel(image_mean) if do_normalize else (0.0,) * _CHANNELS
        stds = _per_channel(image_std) if do_normalize else (1.0,) * _CHANNELS
        self._undone.spec = _undone_spec(self._layout, 1.0 / rescale_factor if do_rescale else 1.0, means, stds)
        colours = images[..., :_CHANNELS, :, :]
        return colours if self._layout == "patches" else colours.contiguous()


def make_uint8_part(part: Any, mixin: type[Uint8Part], undone: Undone) -> Any:
    """Return the uint8 copy of a part; its calls keep `undone` up to date."""
    kind = type(f"Compact{type(part).__name__}", (mixin, type(part)), {"_undone": undone})
    copied: Any = object.__new__(kind)
    copied.__dict__ = part.__dict__  # shared: a setting that is changed later holds for both
    return copied


@lru_cache(maxsize=16)
def _undone_spec(
    layout: Literal["patches", "planes"], unit: float, means: tuple[float, ...], stds: tuple[float, ...]
) -> PartSpec:
    """Compute as the original computes it, in float32: finished pixels then come out the same."""
    mean, std = ((torch.tensor(values) * unit).tolist() for values in (means, stds))
    return PartSpec(layout=layout, repeat=1, mean=tuple(mean), std=tuple(std))


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

    Patches that the model merges follow each other. Of four bytes a pixel, the colours are taken out of numbers, not
    byte by byte.
    """
    num_images, num_channels, height, width = images.shape
    area = patch_size**2
    if images.stride()[1:] != (1, 4 * width, 4):
        patches = _move_lines(images.contiguous().numpy(), patch_size, patch_size, merge_size)
        return torch.from_numpy(patches.view(np.uint8).reshape(num_images, -1, num_channels * area))
    rows = images.as_strided((num_images, 1, height, 4 * width), (images.stride(0), 0, 4 * width, 1)).numpy()
    pixels = _move_lines(rows, 4 * patch_size, patch_size, merge_size).view("<u4").reshape(num_images, -1, area)
    colours = np.empty((num_images, pixels.shape[1], num_channels, area), np.uint8)
    for channel in range(num_channels):
        np.right_shift(pixels, 8 * channel, out=colours[:, :, channel], casting="unsafe")
    return torch.from_numpy(colours.reshape(num_images, -1, num_channels * area))


def _move_lines(planes: Any, line: int, patch_size: int, merge_size: int) -> Any:
    """Return [images, rows, columns, merge, merge, planes, patch] of bytes [images, planes, height, width].

    A line of a patch, of so many bytes, is moved as one value.
    """
    num_images, num_planes, height, width = planes.shape
    rows, columns = height // patch_size // merge_size, width // line // merge_size
    lines = planes.view(np.dtype((np.void, line)))  # [images, planes, height, columns * merge]
    lines = lines.reshape(num_images, num_planes, rows, merge_size, patch_size, columns, merge_size)
    return np.ascontiguousarray(lines.transpose(0, 2, 5, 3, 6, 1, 4))


COMPACT_FAMILIES: Final = ("gemma3", "glm46v", "internvl", "qwen2_5_vl", "qwen2_vl", "qwen3_omni_moe", "qwen3_vl")
"""Families whose finished pixels were proven equal to the processor's."""

_PARTS: Final[dict[str, type[Uint8Part]]] = {
    "Gemma3ImageProcessor": Uint8Part,
    "Glm46VImageProcessor": _PatchImages,
    "Glm46VVideoProcessor": _PatchVideos,
    "GotOcr2ImageProcessor": Uint8Part,
    "InternVLVideoProcessor": Uint8Part,
    "Qwen2VLImageProcessor": _PatchImages,
    "Qwen2VLVideoProcessor": _PatchVideos,
    "Qwen3VLVideoProcessor": _PatchVideos,
}
"""The parts that these may have: some give rows of patches, the others whole images or crops.

Families that fill batches with black crops after their own normalising (LLaVA-OneVision) do not belong here: a black
crop of bytes would come out as normalised black instead of zero.
"""


class CompactPath:
    """A processor's uint8 copy, and what finishes its pixels."""

    def __init__(self, processor: Processor) -> None:
        """Make the copy; raise `ConfigError` with the reason if the processor has none."""
        family = read_family(processor)
        if family not in COMPACT_FAMILIES:
            known = ", ".join(COMPACT_FAMILIES)
            raise ConfigError(f"{type(processor).__name__} has no compact path (families that have one: {known})")
        self._original = processor
        self._undone: dict[str, Undone] = {}
        self.processor: Any = copy.copy(processor)
        """Called instead of the original: the same ids and grids, pixels as bytes."""
        for name in _PART_NAMES:
            part = getattr(processor, name, None)
            if part is None:
                continue
            mixin = _PARTS.get(type(part).__name__)
            reason = "its class is not known" if mixin is None else _find_unknown_step(part)
            if mixin is None or reason:
                raise ConfigError(f"{type(part).__name__} of {type(processor).__name__} has no compact path: {reason}")
            self._undone[name] = Undone()
            compact = make_uint8_part(part, mixin, self._undone[name])
            _try_out(part, compact, self._undone[name], name)
            setattr(self.processor, name, compact)
        self.spec  # noqa: B018 - raises where two parts cannot share a key

    @staticmethod
    def for_processor(processor: Processor) -> tuple[CompactPath | None, str]:
        """Return the path of a processor and "", or None and the reason why there is none."""
        # Trying a path out is slow, and some callers ask once per batch.
        key: Any = processor  # compared as an object
        return _find_path(key, *(getattr(processor, name, None) for name in (*_PART_NAMES, "tokenizer")))

    def __reduce__(self) -> tuple[Any, ...]:
        return CompactPath, (self._original,)

    @property
    def spec(self) -> PixelSpec:
        """What the last calls left undone."""
        parts: dict[str, PartSpec] = {}
        for name, undone in self._undone.items():
            key = _key_of(self.processor, name)
            if undone.spec is not None and parts.setdefault(key, undone.spec) != undone.spec:
                raise ConfigError(
                    f"{type(self.processor).__name__} has no compact path: it normalises images and videos differently "
                    f"and gives both as '{key}'"
                )
        return PixelSpec(parts=tuple(sorted(parts.items())))

    def tag(self, batch: Mapping[str, Any]) -> dict[str, str]:
        """Return the entry that a batch of the copy must carry; none where it has no pixels."""
        spec = self.spec
        parts = tuple((key, part) for key, part in spec.parts if batch.get(key) is not None)
        return {PIXEL_SPEC_KEY: PixelSpec(parts=parts).dump()} if parts else {}


def find_compact_path(processor: Processor) -> CompactPath | None:
    """Return the path; None, and a line in the log for the first processor of its kind, where there is none."""
    path, reason = CompactPath.for_processor(processor)
    if path is None:
        _say_once(reason)
    return path


@lru_cache(maxsize=64)
def _say_once(reason: str) -> None:
    logger.warning("Pixels stay full, as the processor gives them: %s.", reason)


@lru_cache(maxsize=8)
def _find_path(processor: Processor, *parts: Any) -> tuple[CompactPath | None, str]:  # noqa: ARG001
    """Find the path of a processor; `parts` make sure that one whose parts were replaced is looked at again."""
    try:
        return CompactPath(processor), ""
    except ConfigError as error:
        return None, str(error)


def _key_of(processor: Processor, part_name: str) -> str:
    """Return the key under which a part's pixels come out; InternVL gives frames as images."""
    images_only = read_family(processor) == "internvl"
    return PIXEL_KEYS[0] if part_name == "image_processor" or images_only else PIXEL_KEYS[1]


def _find_unknown_step(part: Any) -> str:
    if getattr(part, "backend", None) != "torchvision":
        return f"it does not resize with torchvision but with {getattr(part, 'backend', 'something else')}"
    steps = {name for name in dir(part) if name.startswith("do_") and getattr(part, name) is True}
    unknown = sorted(steps - _KNOWN_STEPS)
    if unknown:
        return f"it has steps that cannot be put off ({', '.join(unknown)})"
    if not (getattr(part, "do_rescale", False) or getattr(part, "do_normalize", False)):
        return "it neither rescales nor normalises, so there is nothing to put off"
    return ""


def _try_out(part: Any, uint8_part: Any, undone: Undone, name: str) -> None:
    """Refuse a uint8 part whose finished pixels are not the original's."""
    if name == "image_processor":
        arguments: dict[str, Any] = {"images": _trial_images()}
    else:
        arguments = {"videos": [_trial_pixels(4, 40, 72)], "do_sample_frames": False}
    try:
        full = dict(part(**arguments, return_tensors="pt"))
        compact = dict(uint8_part(**arguments, return_tensors="pt"))
        key = next(key for key in PIXEL_KEYS if key in full)
        spec = undone.spec
        is_same = spec is not None and compact[key].dtype == torch.uint8 and full[key].is_floating_point()
        if is_same and spec is not None:
            finished = finish_tensor(compact[key], spec, torch.float32)
            is_same = finished.shape == full[key].shape and bool((finished - full[key]).abs().max() <= _TOLERANCE)
    except Exception as error:  # a step that does not take bytes may fail in any way
        raise ConfigError(f"{type(part).__name__} has no compact path: trying it failed ({error!r})") from error
    if not is_same:
        raise ConfigError(
            f"{type(part).__name__} has no compact path: it has a step that is not known here, its pixels differ from "
            "the finished ones"
        )


def _trial_pixels(num_frames: int, height: int, width: int) -> Any:
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (num_frames, height, width, 3), dtype=np.uint8)


def _trial_images() -> list[Any]:
    from PIL import Image

    return [Image.fromarray(_trial_pixels(1, height, width)[0]) for height, width in ((37, 90), (128, 61))]
