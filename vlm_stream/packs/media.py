"""Media of several samples -> one set, in the order of the samples.

Enters: samples, or whole packs. Leaves: for each media name one tensor (rows joined) or one list. Models give the rows
to media tokens in their order, so rows and tokens must be joined in the same order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from vlm_stream.errors import ConfigError
from vlm_stream.packs.keys import TOKEN_KEYS
from vlm_stream.pixels.spec import PIXELS_KEY, carry_spec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vlm_stream.packs.keys import Sample

__all__ = ["MediaJoinError", "media_of", "merge_media"]


class MediaJoinError(ConfigError, TypeError):
    """Media of several samples are of forms that cannot stand in one batch."""


def media_of(sample: Sample) -> dict[str, Any]:
    """Return the media of a sample: tensors and lists that do not run along its tokens."""
    known = {k: v for k, v in sample.items() if k not in TOKEN_KEYS and not k.startswith("_")}
    return {k: v for k, v in known.items() if isinstance(v, (torch.Tensor, list, tuple))} | carry_spec([sample])


def merge_media(samples: Sequence[Sample]) -> dict[str, Any]:
    """Join the media of samples along axis 0; lists (pixels of different sizes) become one flat list.

    Raises:
        MediaJoinError: Some samples hold a medium as a tensor and others as a list.
        ConfigError: Some hold compact pixels and others full ones.
    """
    media = [media_of(sample) for sample in samples]
    names = dict.fromkeys(name for one in media for name in one if name != PIXELS_KEY)
    return {name: _join(name, [one[name] for one in media if name in one]) for name in names} | carry_spec(media)


def _join(name: str, values: list[Any]) -> Any:
    if all(isinstance(value, torch.Tensor) for value in values):
        return torch.cat(_same_shape(name, values))
    if any(isinstance(value, torch.Tensor) for value in values):
        raise MediaJoinError(
            f"'{name}' is a tensor in some samples of a pack and a list in others, so their order cannot be kept. "
            f"Encode all samples with one processor configuration."
        )
    return [row for value in values for row in value]


def _same_shape(name: str, values: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors with zeros added where rows differ in size (tiles of an image), as processors pad a batch."""
    shapes = {tuple(value.shape[1:]) for value in values}
    if len(shapes) == 1:
        return values
    if len({len(shape) for shape in shapes}) > 1:
        raise MediaJoinError(
            f"'{name}' has rows of different rank in one pack ({', '.join(map(str, sorted(shapes)))}), which cannot be "
            f"joined. Encode all samples with one processor configuration."
        )
    target = [max(sizes) for sizes in zip(*shapes, strict=True)]
    # `pad` takes pairs from the last axis to the first.
    room = [
        [n for size, most in zip(v.shape[:0:-1], target[::-1], strict=True) for n in (0, most - size)] for v in values
    ]
    return [torch.nn.functional.pad(value, pairs) for value, pairs in zip(values, room, strict=True)]
