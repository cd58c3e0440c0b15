"""The one place where a processor is called: rendered texts and decoded media in, its batch out.

Everything goes in as transformers' own `apply_chat_template` would pass it, so that ids and pixels are bit for bit what
the processor gives when it is used directly. Class-specific habits of passing videos live here and nowhere else.

Tensors are asked of the parts that make pixels only, and lists of ids and masks are turned into tensors here: the
library takes such lists apart number by number, which is slow for text without media.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vlm_stream.encode.load_media import LoadedMedia
from vlm_stream.errors import BadSampleError
from vlm_stream.tokens import Processor, call_arguments

if TYPE_CHECKING:
    import torch


logger = logging.getLogger(__name__)

SHARED_PIXELS: Final = frozenset({"SmolVLMProcessor"})
"""Processors that cannot take images and videos in one call."""
_PARTS: Final = {"images": "images_kwargs", "videos": "videos_kwargs", "audio": "audio_kwargs"}
_PART_OPTIONS: Final = {
    "do_sample_frames": "videos",
    "video_metadata": "videos",
    "return_metadata": "videos",
    "sampling_rate": "audio",
}
_TEXT_OPTIONS: Final = frozenset({"padding", "add_special_tokens"})

_whole_classes: set[type] = set()  # classes that were found not to take options for their parts


def call_processor(
    processor: Processor, texts: Sequence[str], loaded: Sequence[LoadedMedia], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Call the processor on a batch of rendered texts, each with its media; `options` win over what is derived here."""
    arguments = {**_arguments(processor, texts, loaded), **options}
    if not _takes_parts(processor, options):
        return _call_whole(processor, texts, arguments)
    try:
        return _call_by_parts(processor, texts, arguments)
    except Exception as error:
        batch = _call_whole(processor, texts, arguments)  # raises if the sample is to blame
        _whole_classes.add(type(processor))
        logger.info("%s makes its own tensors from now on: %s", type(processor).__name__, error)
        return batch


def _arguments(processor: Processor, texts: Sequence[str], loaded: Sequence[LoadedMedia]) -> dict[str, Any]:
    has_images, has_videos = any(media.images for media in loaded), any(media.videos for media in loaded)
    if has_images and has_videos and type(processor).__name__ in SHARED_PIXELS:
        raise BadSampleError(
            "encode",
            "mixed_media",
            f"{type(processor).__name__} returns images and videos under one key and would lose the images.",
        )
    return call_arguments(
        processor,
        texts[0],
        images=[media.images for media in loaded],
        videos=[[video.frames for video in media.videos] for media in loaded],
        metadata=_metadata_for(processor, loaded) if has_videos else None,
        audios=[audio for media in loaded for audio in media.audios],
    )


def _metadata_for(processor: Processor, loaded: Sequence[LoadedMedia]) -> Any:
    """Return the metadata in the form that the processor's class takes: a list, or one object for its one video."""
    metadata = [facts for media in loaded for facts in media.video_metadata()]
    if not type(processor).__name__.startswith("NemotronH"):
        return metadata
    if len(metadata) > 1:
        raise BadSampleError("encode", "too_many_videos", f"{type(processor).__name__} takes one video per sample.")
    from transformers.video_utils import VideoMetadata

    return VideoMetadata(**metadata[0])


def _takes_parts(processor: Processor, options: Mapping[str, Any]) -> bool:
    """Say whether the class is one of transformers' own, and no option is given that may be meant for a part."""
    kind = type(processor)
    return (
        kind.__module__.startswith("transformers.") and kind not in _whole_classes and options.keys() <= _TEXT_OPTIONS
    )


def _call_whole(processor: Processor, texts: Sequence[str], arguments: Mapping[str, Any]) -> dict[str, Any]:
    return dict(processor(text=list(texts), **{"return_tensors": "pt", **arguments}))


def _call_by_parts(processor: Processor, texts: Sequence[str], arguments: Mapping[str, Any]) -> dict[str, Any]:
    parts: dict[str, dict[str, Any]] = {medium: {"return_tensors": "pt"} for medium in _PARTS if medium in arguments}
    whole: dict[str, Any] = {_PARTS[medium]: options for medium, options in parts.items()}
    for name, value in arguments.items():
        (parts[_PART_OPTIONS[name]] if name in _PART_OPTIONS else whole)[name] = value
    return {key: _tensor_of(value) for key, value in dict(processor(text=list(texts), **whole)).items()}


def _tensor_of(value: Any) -> torch.Tensor:
    """Return what the library would have made of a value; raise where that is not known."""
    import torch

    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    array = np.array(value)
    if array.dtype == np.int64:
        return torch.from_numpy(array)
    if array.dtype == np.float64:  # seconds of videos, a few of them
        return torch.tensor(value)
    raise TypeError(f"it gave a {type(value).__name__} of {array.dtype}")
