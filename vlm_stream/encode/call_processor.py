"""The one place where a processor is called: rendered texts and decoded media in, its batch out.

Everything goes in as transformers' own `apply_chat_template` would pass it, so that ids and pixels are bit for bit what
the processor gives when it is used directly. Class-specific habits of passing videos live here and nowhere else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from vlm_stream.encode.chat_format import tokenizer_of
from vlm_stream.encode.load_media import LoadedMedia, audio_rate_of
from vlm_stream.errors import BadSampleError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["SHARED_PIXELS", "call_processor"]

SHARED_PIXELS: Final = frozenset({"SmolVLMProcessor"})
"""Processors that cannot take images and videos in one call."""


def call_processor(
    processor: Any, texts: Sequence[str], loaded: Sequence[LoadedMedia], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Call the processor on a batch of rendered texts, each with its media; `options` win over what is derived here."""
    kwargs: dict[str, Any] = {"return_tensors": "pt"}
    bos = getattr(tokenizer_of(processor), "bos_token", None)
    if bos is not None and texts[0].startswith(bos):
        kwargs["add_special_tokens"] = False  # the template wrote it
    if any(media.images for media in loaded):
        kwargs["images"] = [media.images for media in loaded]
    if any(media.videos for media in loaded):
        kwargs["videos"] = [[video.frames for video in media.videos] for media in loaded]
        kwargs["do_sample_frames"] = False
        kwargs["video_metadata"] = _metadata_for(processor, loaded)
    if "images" in kwargs and "videos" in kwargs and type(processor).__name__ in SHARED_PIXELS:
        raise BadSampleError(
            "encode",
            "mixed_media",
            f"{type(processor).__name__} returns images and videos under one key and would lose the images.",
        )
    audios = [audio for media in loaded for audio in media.audios]
    if audios:
        kwargs |= {"audio": audios, "sampling_rate": audio_rate_of(processor)}
    return dict(processor(text=list(texts), **{**kwargs, **options}))


def _metadata_for(processor: Any, loaded: Sequence[LoadedMedia]) -> Any:
    """Return the metadata in the form that the processor's class takes: a list, or one object for its one video."""
    metadata = [facts for media in loaded for facts in media.video_metadata()]
    if not type(processor).__name__.startswith("NemotronH"):
        return metadata
    if len(metadata) > 1:
        raise BadSampleError("encode", "too_many_videos", f"{type(processor).__name__} takes one video per sample.")
    from transformers.video_utils import VideoMetadata

    return VideoMetadata(**metadata[0])
