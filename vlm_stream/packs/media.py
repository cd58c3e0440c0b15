"""Media of several samples -> one set, in the order of the samples.

Enters: samples, or whole packs. Leaves: for each media name one tensor (rows joined) or one list. Models give the rows
to media tokens in their order, so rows and tokens must be joined in the same order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from vlm_stream.errors import ConfigError
from vlm_stream.packs.joined_memory import allocate, is_worthwhile
from vlm_stream.packs.keys import TOKEN_KEYS
from vlm_stream.pixels import PIXELS_KEY, carry_spec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vlm_stream.packs.keys import Sample

__all__ = ["MediaJoinError", "join_rows", "media_of", "merge_media"]


class MediaJoinError(ConfigError, TypeError):
    """Media of several samples are of forms that cannot stand in one batch."""


def media_of(sample: Sample) -> dict[str, Any]:
    """Return the media of a sample: tensors and lists that do not run along its tokens."""
    known = {k: v for k, v in sample.items() if k not in TOKEN_KEYS and not k.startswith("_")}
    return {k: v for k, v in known.items() if isinstance(v, (torch.Tensor, list, tuple))} | carry_spec([sample])


def merge_media(samples: Sequence[Sample]) -> dict[str, Any]:
    """Join the media of samples along axis 0; lists of tensors (pixels of different sizes) become one flat list.

    Raises:
        MediaJoinError: Some samples hold a medium as a tensor and others as a list.
        ConfigError: Some hold compact pixels and others full ones.
    """
    media = [media_of(sample) for sample in samples]
    names = dict.fromkeys(name for one in media for name in one if name != PIXELS_KEY)
    return {name: join_rows(name, [one[name] for one in media if name in one]) for name in names} | carry_spec(media)


def join_rows(name: str, values: Sequence[Any], dtype: torch.dtype | None = None) -> Any:
    """Join what several rows hold under one name.

    Args:
        name: For messages.
        values: Tensors, lists of tensors (which become one flat list), or lists of numbers (which become a tensor).
        dtype: What to convert to; None: as they are.

    Raises:
        MediaJoinError: The values have different forms.
    """
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
    """Join in one pass over the memory, since pixels are the largest thing that a worker touches.

    Rows that differ in size (tiles of an image) end with zeros, as processors pad a batch.
    """
    if len(values) == 1 and not is_worthwhile(values[0].nbytes):
        return values[0].to(dtype)
    shapes = {tuple(value.shape[1:]) for value in values}
    if len({len(shape) for shape in shapes}) > 1:
        raise MediaJoinError(
            f"'{name}' has rows of different rank in one pack ({', '.join(map(str, sorted(shapes)))}), which cannot be "
            f"joined. Encode all samples with one processor configuration."
        )
    largest = [max(sizes) for sizes in zip(*shapes, strict=True)]
    num_rows = sum(len(value) for value in values)
    out = allocate((num_rows, *largest), dtype, values[0].device, zeros=len(shapes) > 1)
    begin = 0
    for value in values:
        place = (slice(begin, begin + len(value)), *(slice(0, size) for size in value.shape[1:]))
        out[place] = value
        begin += len(value)
    return out
