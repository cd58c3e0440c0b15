"""Media of several samples -> one set, in the order of the samples.

Enters: samples, or whole packs. Leaves: for each media name one tensor (rows joined) or one list. Models give the rows
to media tokens in their order, so rows and tokens must be joined in the same order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from vlm_stream.errors import ConfigError
from vlm_stream.packs.keys import TOKEN_KEYS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vlm_stream.packs.keys import Sample

__all__ = ["MediaJoinError", "media_of", "merge_media"]


class MediaJoinError(ConfigError, TypeError):
    """Media of several samples are of forms that cannot stand in one batch."""


def media_of(sample: Sample) -> dict[str, Any]:
    """Return the media of a sample: tensors and lists that do not run along its tokens."""
    known = {k: v for k, v in sample.items() if k not in TOKEN_KEYS and not k.startswith("_")}
    return {k: v for k, v in known.items() if isinstance(v, (torch.Tensor, list, tuple))}


def merge_media(samples: Sequence[Sample]) -> dict[str, Any]:
    """Join the media of samples along axis 0; lists (pixels of different sizes) become one flat list.

    Raises:
        MediaJoinError: Some samples hold a medium as a tensor and others as a list.
    """
    media = [media_of(sample) for sample in samples]
    names = dict.fromkeys(name for one in media for name in one)
    return {name: _join(name, [one[name] for one in media if name in one]) for name in names}


def _join(name: str, values: list[Any]) -> Any:
    if all(isinstance(value, torch.Tensor) for value in values):
        shapes = {tuple(value.shape[1:]) for value in values}
        if len(shapes) > 1:
            raise MediaJoinError(
                f"'{name}' has rows of different shapes in one pack ({', '.join(map(str, sorted(shapes)))}), which "
                f"cannot be joined into one tensor. Encode such a family with lists of pixels, or do not pack it."
            )
        return torch.cat(values)
    if any(isinstance(value, torch.Tensor) for value in values):
        raise MediaJoinError(
            f"'{name}' is a tensor in some samples of a pack and a list in others, so their order cannot be kept. "
            f"Encode all samples with one processor configuration."
        )
    return [row for value in values for row in value]
