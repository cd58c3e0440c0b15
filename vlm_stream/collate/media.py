"""Media of several rows -> one set, in the order of the rows; and how many media each row has.

Enters: samples, packs or conversations. Leaves: for each media key one tensor (rows joined) or one list; counts `[B]`.
Models give media rows to media tokens in their order, so both must be joined in the same order. Knows no family.
"""

import multiprocessing
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Final

import torch

from vlm_stream.blocks import allocate_block
from vlm_stream.conversation import Conversation, iter_media
from vlm_stream.errors import ConfigError
from vlm_stream.keys import (
    IMAGE_COUNTS_KEY,
    PIXEL_KEYS,
    PIXEL_SPEC_KEY,
    POSITIONS_KEY,
    TOKEN_KEYS,
    VIDEO_COUNTS_KEY,
    Sample,
)
from vlm_stream.pixels import carry_spec

_NOT_MEDIA: Final = frozenset(
    {*TOKEN_KEYS, POSITIONS_KEY, "seq_lens", "seq_lens_padded", "n_images", "n_videos", "conversation"}
)
_MASK_OF: Final = {"audio_input_features": "audio_attention_mask"}
"""Phi-4 gives a mask of frames only with batches of several clips, so single samples come without one."""
_IMAGE_GRIDS: Final = ("image_grid_thw", "grid_thws", "image_grid_hws")
_VIDEO_GRIDS: Final = ("video_grid_thw",)
_LARGE_BYTES: Final = 1 << 20  # below this, a copy costs less than a shared segment


class MediaJoinError(ConfigError, TypeError):
    """Media of several samples are of forms that cannot be in one batch."""


def media_of(sample: Sample) -> dict[str, Any]:
    """Return the media of a sample: tensors, and lists of tensors or numbers, that do not run along its tokens."""
    found = {k: v for k, v in sample.items() if k not in _NOT_MEDIA and not k.startswith("_") and _is_joinable(v)}
    if sample.get(PIXEL_SPEC_KEY) is not None and not found.keys().isdisjoint(PIXEL_KEYS):
        found[PIXEL_SPEC_KEY] = sample[PIXEL_SPEC_KEY]
    return found


def _is_joinable(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.ndim > 0
    is_list = isinstance(value, (list, tuple)) and len(value) > 0
    return is_list and all(isinstance(entry, (torch.Tensor, int, float)) for entry in value)


def merge_media(rows: Sequence[Sample], *, pixel_dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Join the media of samples or packs along axis 0; lists of tensors (pixels of several sizes) become one flat list.

    Pixels are converted to `pixel_dtype`. Compact ones stay bytes, and the batch says how to finish them; they are not
    joined with full ones.
    """
    media = [media_of(row) for row in rows]
    spec = carry_spec(media)
    merged: dict[str, Any] = {}
    for name in dict.fromkeys(name for one in media for name in one if name != PIXEL_SPEC_KEY):
        parts = [one[name] for one in media if name in one]
        is_finished = name in PIXEL_KEYS and not spec
        merged[name] = join_rows(name, parts, pixel_dtype if is_finished else None)
    for name, mask in _MASK_OF.items():
        with_clips = [one for one in media if name in one]
        if len(with_clips) > 1:
            masks = [one.get(mask, torch.ones(one[name].shape[:2], dtype=torch.bool)) for one in with_clips]
            merged[mask] = join_rows(mask, masks)  # [clips, longest], False where a shorter clip was padded
    return merged | spec


def join_rows(name: str, values: Sequence[Any], dtype: torch.dtype | None = None) -> Any:
    """Join tensors, lists of tensors (one flat list) or lists of numbers (a tensor) that rows hold under one name."""
    values = [torch.as_tensor(value) if _are_numbers(value) else value for value in values]
    if all(isinstance(value, torch.Tensor) for value in values):
        return _cat_padded(name, values, dtype or values[0].dtype)
    if any(isinstance(value, torch.Tensor) for value in values):
        raise MediaJoinError(
            f"'{name}' is a tensor in some samples of a pack and a list in others, so they cannot be joined in their "
            f"order. Encode all samples with one processor configuration."
        )
    return [row if dtype is None else row.to(dtype) for value in values for row in value]


def _are_numbers(value: Any) -> bool:
    is_list = not isinstance(value, torch.Tensor) and len(value) > 0
    return is_list and all(isinstance(entry, (int, float)) for entry in value)


def _cat_padded(name: str, values: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Join in one pass over the memory: pixels are the largest data that a worker handles.

    Rows that differ in size (tiles of an image) end with zeros, as processors pad a batch.
    """
    if len(values) == 1:  # in memory that the parent maps already, or it is copied there when it is sent
        return values[0].to(dtype)
    shapes = {tuple(value.shape[1:]) for value in values}
    if len({len(shape) for shape in shapes}) > 1:
        raise MediaJoinError(
            f"'{name}' has rows of different rank in one pack ({', '.join(map(str, sorted(shapes)))}), which cannot be "
            f"joined. Encode all samples with one processor configuration."
        )
    largest = [max(sizes) for sizes in zip(*shapes, strict=True)]
    num_rows = sum(len(value) for value in values)
    out = _allocate((num_rows, *largest), dtype, values[0].device, zeros=len(shapes) > 1)
    begin = 0
    for value in values:
        place = (slice(begin, begin + len(value)), *(slice(0, size) for size in value.shape[1:]))
        out[place] = value
        begin += len(value)
    return out


def _allocate(shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, zeros: bool) -> torch.Tensor:
    """Return a tensor of zeros or, where they are not needed, of anything.

    In a worker it lies in memory that the parent process can map, which saves one copy.
    """
    num_bytes = prod(shape) * dtype.itemsize
    is_large = device.type == "cpu" and num_bytes >= _LARGE_BYTES
    block = allocate_block(num_bytes) if is_large else None
    if block is not None:
        tensor = block.view(dtype).view(tuple(shape))
        return tensor.zero_() if zeros else tensor
    # A process that is daemonic and offers no blocks is a worker of torch's; ranks that a launcher starts are not.
    if not (is_large and multiprocessing.current_process().daemon):
        return (torch.zeros if zeros else torch.empty)(tuple(shape), dtype=dtype, device=device)
    # Its parent maps the segment, which the system hands out filled with zeros.
    segment = torch.UntypedStorage._new_shared(num_bytes)  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=dtype).set_(segment, 0, tuple(shape))  # type: ignore[call-overload, no-any-return]


def cast_pixels(batch: Mapping[str, Any], dtype: torch.dtype | None) -> dict[str, Any]:
    """Return the batch with its pixels, one tensor or a list of them, in another type; compact ones stay bytes."""
    out = dict(batch)
    if dtype is None or PIXEL_SPEC_KEY in out:
        return out
    for key in PIXEL_KEYS:
        pixels = out.get(key)
        if isinstance(pixels, torch.Tensor):
            out[key] = pixels.to(dtype)
        elif isinstance(pixels, (list, tuple)):
            out[key] = [image.to(dtype) for image in pixels]
    return out


def counts_of(images: Sequence[int], videos: Sequence[int]) -> dict[str, torch.Tensor]:
    """Return `n_images_per_sample` and `n_videos_per_sample` `[B]`, each only if some row has that medium."""
    given = {IMAGE_COUNTS_KEY: images, VIDEO_COUNTS_KEY: videos}
    return {key: torch.tensor(numbers, dtype=torch.int64) for key, numbers in given.items() if any(numbers)}


def count_conversation_media(conversations: Sequence[Conversation]) -> dict[str, torch.Tensor]:
    """Count the images and videos of conversations."""
    kinds = [[item["type"] for item in iter_media(conversation)] for conversation in conversations]
    return counts_of([row.count("image") for row in kinds], [row.count("video") for row in kinds])


def count_grids(rows: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """Count the images and videos of encoded rows by their grids, the only exact sign of them."""
    return counts_of(_lengths(rows, _IMAGE_GRIDS), _lengths(rows, _VIDEO_GRIDS))


def count_media(rows: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """Count the images and videos of samples or packs by what they have: grids, else sizes, else pixel rows."""
    images = _lengths(rows, (*_IMAGE_GRIDS, "image_sizes", PIXEL_KEYS[0]))
    return counts_of(images, _lengths(rows, (*_VIDEO_GRIDS, "num_frames_per_video", PIXEL_KEYS[1])))


def _lengths(rows: Sequence[Sample], keys: Sequence[str]) -> list[int]:
    """Return for each row the length of the first of `keys` that it has."""
    return [next((len(row[key]) for key in keys if row.get(key) is not None), 0) for row in rows]
