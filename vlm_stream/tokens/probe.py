"""Ask the processor itself: a few tiny samples are encoded for real and compared with their counted lengths.

Counting rules follow one version of transformers; another version may resize, sample or write otherwise. Converters
probe once, at the start, and what cannot be confirmed is called an estimate. Enter a processor and its geometry; leaves
the geometry, with `is_exact` told by evidence. This is the only file of the room that needs pixels.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from importlib import import_module
from inspect import signature
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vlm_stream.tokens.count import count_tokens
from vlm_stream.tokens.frames import frame_indices, make_video_metadata
from vlm_stream.tokens.sizes import AudioSize, ImageSize, MediaSizes, VideoSize, make_columns
from vlm_stream.tokens.text import TextCounter

if TYPE_CHECKING:
    from vlm_stream.conversation import Conversation
    from vlm_stream.tokens.families import Processor
    from vlm_stream.tokens.frames import FrameRule
    from vlm_stream.tokens.geometry import Geometry

__all__ = ["encode_pixels", "probe_geometry"]

_log = logging.getLogger(__name__)

_IMAGES: Final = (ImageSize(height=97, width=301), ImageSize(height=240, width=180))
_VIDEO: Final = VideoSize(frames=40, height=300, width=400, fps=7.3, seconds=40 / 7.3)
"""Large enough that Qwen3-VL's limits for whole clips bite: their default is announced to change."""
_RATE: Final = 16000


def probe_geometry(processor: Processor, geometry: Geometry) -> Geometry:
    """Confirm a geometry by encoding an image, two images, a clip, a sound and plain text, as far as it has rules.

    Args:
        processor: The processor that the geometry was read from.
        geometry: What to confirm.

    Returns:
        The same geometry; with `is_exact=False`, and a line in the log, when a length differs or the processor fails.
    """
    if not geometry.is_exact:
        return geometry
    counter = TextCounter(processor, geometry)
    for name, sizes in _list_probes(geometry):
        content = [*_make_items(sizes), {"type": "text", "text": "What is it?\n"}]
        conversation = [
            {"role": "user", "content": content},
            {"role": "assistant", "content": [{"type": "text", "text": "A."}]},
        ]
        columns = make_columns([sizes], [counter.count(conversation, sizes)])
        counted = int(count_tokens(columns, geometry).tokens[0])
        try:
            actual = len(encode_pixels(processor, conversation, geometry.frames)["input_ids"][0])
        except Exception as error:  # a processor of another version may fail in any way
            _log.warning("%s failed on a probe (%s): %r. Lengths are estimates.", _name(processor), name, error)
            return replace(geometry, is_exact=False)
        if actual != counted:
            _log.warning(
                "%s gives %d tokens for a probe (%s) that was counted as %d: this version of transformers writes or "
                "resizes otherwise. Lengths are estimates.",
                _name(processor),
                actual,
                name,
                counted,
            )
            return replace(geometry, is_exact=False)
    return geometry


def _name(processor: Processor) -> str:
    return type(processor).__name__


def _list_probes(geometry: Geometry) -> list[tuple[str, MediaSizes]]:
    probes = [("text", MediaSizes())]
    if geometry.image is not None:
        probes += [("an image", MediaSizes(images=_IMAGES[:1])), ("two images", MediaSizes(images=_IMAGES))]
    if geometry.video is not None:
        probes.append(("a video", MediaSizes(videos=(_VIDEO,))))
    if geometry.audio is not None:
        probes.append(("a sound", MediaSizes(audios=(AudioSize(samples=9001, rate=_RATE),))))
    return probes


def _make_items(sizes: MediaSizes) -> list[dict[str, Any]]:
    images = [np.zeros((image.height, image.width, 3), np.uint8) for image in sizes.images]
    sounds = [np.zeros(sound.samples, np.float32) for sound in sizes.audios]
    return [
        *({"type": "image", "image": pixels} for pixels in images),
        *({"type": "video", "video": video} for video in sizes.videos),
        *({"type": "audio", "audio": wave} for wave in sounds),
    ]


def encode_pixels(processor: Processor, conversation: Conversation, rule: FrameRule) -> dict[str, Any]:
    """Run a processor on a conversation whose images are pixels, whose sounds are waves, and whose clips are sizes.

    Clips become black frames, those that the rule picks; the processor is told their times and samples nothing itself.
    """
    metadata = []
    messages: Conversation = []
    for message in conversation:
        content = []
        for item in message["content"]:
            if item["type"] == "video":
                size: VideoSize = item["video"]
                indices = frame_indices(size.frames, size.fps, rule, size.picked or None)
                metadata.append(make_video_metadata(size.frames, size.fps, size.seconds, indices))
                content.append(
                    {"type": "video", "video": np.zeros((len(indices), size.height, size.width, 3), np.uint8)}
                )
            else:
                content.append(item)
        messages.append({**message, "content": content})
    options: dict[str, Any] = {}
    if metadata:
        options = {"do_sample_frames": False, "video_metadata": metadata}
        if _name(processor).startswith("NemotronH_Omni"):  # reads the metadata of its only clip, as an object
            video_utils = import_module(f"{type(processor).__module__.split('.')[0]}.video_utils")
            options["video_metadata"] = video_utils.VideoMetadata(**metadata[0])
    call = processor.apply_chat_template
    if "processor_kwargs" in signature(call).parameters:  # since 5.0; before, options stand beside the others
        options = {"processor_kwargs": options}
    if processor.chat_template is None:  # Phi-4's class loses it on loading
        options["chat_template"] = processor.tokenizer.chat_template
    return dict(call([messages], tokenize=True, return_dict=True, return_tensors="pt", **options))
