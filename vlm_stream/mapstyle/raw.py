"""The raw samples below dataset wrappers, one at a time, and what they cost.

Enters: a dataset, wrapped or not, and a processor. Leaves: estimated lengths. Samples are looked at and let go: a
dataset that decodes on access is never held in memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from vlm_stream.mapstyle.estimate import estimate_sample_length, extract_image_config, extract_video_config

if TYPE_CHECKING:
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

__all__ = ["estimate_lengths", "raw_dataset"]


def raw_dataset(dataset: Any) -> Any:
    """Follow `.dataset` down to what is wrapped; its samples hold conversations and metadata."""
    while hasattr(dataset, "dataset"):
        dataset = dataset.dataset
    return dataset


def estimate_lengths(samples: Any, processor: Any = None) -> tuple[Ints, Ints]:
    """Return `[n]` estimated tokens of each sample, and how many of them stand for media."""
    configs = extract_image_config(processor), extract_video_config(processor)
    pairs = [estimate_sample_length(samples[i], *configs, return_media_tokens=True) for i in range(len(samples))]
    table = np.asarray(pairs, dtype=np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]
