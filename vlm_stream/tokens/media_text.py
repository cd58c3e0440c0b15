"""What a family writes around its media: one medium's size enters, the text in its place leaves.

Each text holds the medium's embedding token exactly once, however many embeddings there will be, and everything else
that the processor writes: marks of begin and end, timestamps, rows of crops. Special tokens split the text before any
merging, so leaving out their repetitions changes nothing else.
"""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, NamedTuple

import numpy as np

from vlm_stream.errors import require
from vlm_stream.tokens.geometry import Geometry
from vlm_stream.tokens.media import (
    AudioSize,
    FrameRule,
    ImageSize,
    MediaSizes,
    VideoSize,
    sample_clip,
)
from vlm_stream.tokens.rules.pieces import CanvasTiles, RowCrops


class Scene(NamedTuple):
    """What a medium's text may depend on besides the medium."""

    geometry: Geometry  # rules of the processor
    sizes: MediaSizes  # all media of the sample


class _Clip:
    """A clip's sampled frames, as the processor will see them."""

    def __init__(self, size: VideoSize, rule: FrameRule) -> None:
        metadata = sample_clip(size, rule)
        self.indices: list[int] = metadata["frames_indices"]
        self.fps: float = metadata["fps"]
        self.duration: float = metadata["duration"]
        self.timestamps = [index / self.fps for index in self.indices]

    def __len__(self) -> int:
        return len(self.indices)


def _once(token: str, number: int) -> str:
    """Return the embedding token for the first piece of a medium and nothing for the others."""
    return token if number == 0 else ""


def _between(before: str, token: str, after: str) -> Callable[[Any, Any, Scene], str]:
    """Return what writes the processor's tokens of these names, one after the other."""

    def write(processor: Any, size: Any, scene: Scene) -> str:  # noqa: ARG001
        return f"{getattr(processor, before)}{getattr(processor, token)}{getattr(processor, after)}"

    return write


def _apart(*names: str) -> Callable[[Any, Any, Scene], str]:
    """Return what writes the tokenizer's tokens of these names between blank lines."""

    def write(processor: Any, size: Any, scene: Scene) -> str:  # noqa: ARG001
        return "\n\n" + "".join(str(getattr(processor.tokenizer, name)) for name in names) + "\n\n"

    return write


def _write_gemma4_video(processor: Any, size: VideoSize, scene: Scene) -> str:
    clip = _Clip(size, scene.geometry.frames)
    frames = [
        f"{int(second // 60):02d}:{int(second % 60):02d} "
        f"{processor.boi_token}{_once(processor.video_token, number)}{processor.eoi_token}"
        for number, second in enumerate(clip.timestamps)
    ]
    return " ".join(frames)


def _write_internvl_video(processor: Any, size: VideoSize, scene: Scene) -> str:
    frames = [
        f"Frame{number + 1}: {processor.start_image_token}{_once(processor.image_token, number)}"
        f"{processor.end_image_token}"
        for number in range(len(_Clip(size, scene.geometry.frames)))
    ]
    return "\n".join(frames)


def _write_qwen3_video(processor: Any, size: VideoSize, scene: Scene) -> str:
    """Every temporal patch carries the mean time of its first and last frame."""
    clip, patch = _Clip(size, scene.geometry.frames), scene.geometry.frames.temporal_patch_size
    frames = []
    for number, begin in enumerate(range(0, len(clip), patch)):
        second = (clip.timestamps[begin] + clip.timestamps[begin + patch - 1]) / 2
        token = _once(processor.video_token, number)
        frames.append(f"<{second:.1f} seconds>{processor.vision_start_token}{token}{processor.vision_end_token}")
    return "".join(frames)


def _write_glm46v_video(processor: Any, size: VideoSize, scene: Scene) -> str:
    """Every second frame's time follows its patch."""
    clip, patch = _Clip(size, scene.geometry.frames), scene.geometry.frames.temporal_patch_size
    layers = len(clip) // patch
    seconds = [*clip.timestamps[::2], *clip.timestamps[::2][-1:] * layers][:layers]
    frames = [
        f"<|begin_of_image|>{_once(processor.image_token, number)}<|end_of_image|>{second:.1f} seconds"
        for number, second in enumerate(seconds)
    ]
    return "".join(frames)


def _write_kimi_video(processor: Any, size: VideoSize, scene: Scene) -> str:
    """Every chunk of frames follows the time of its first one, to the millisecond."""
    clip, patch = _Clip(size, scene.geometry.frames), scene.geometry.frames.temporal_patch_size
    chunks = []
    for number, second in enumerate(clip.timestamps[::patch]):
        clock = time.strftime("%H:%M:%S", time.gmtime(second)) + f".{int(second % 1 * 1000):03d}"
        token = _once(processor.video_token, number)
        chunks.append(f"{clock}<|media_begin|>video<|media_content|>{token}<|media_end|>")
    return "".join(chunks)


def _smolvlm_view(processor: Any, token: str) -> str:
    whole = getattr(processor, "global_image_token", None) or processor.global_image_tag  # of Idefics3
    return f"{processor.fake_image_token}{whole}{token}{processor.fake_image_token}"


def _write_smolvlm_image(processor: Any, size: ImageSize, scene: Scene) -> str:
    rule = scene.geometry.image
    rows = columns = 0
    if isinstance(rule, RowCrops):
        numbers = rule.count_rows_and_columns(np.asarray([size.height]), np.asarray([size.width]))
        rows, columns = int(numbers[0][0]), int(numbers[1][0])
    if rows == 0:
        return _smolvlm_view(processor, processor.image_token)
    lines = [
        "".join(f"{processor.fake_image_token}<row_{row + 1}_col_{column + 1}>" for column in range(columns)) + "\n"
        for row in range(rows)
    ]
    return "".join(lines) + "\n" + _smolvlm_view(processor, processor.image_token)


def _write_llama4_image(processor: Any, size: ImageSize, scene: Scene) -> str:
    rule = scene.geometry.image
    rows = columns = 1
    if isinstance(rule, CanvasTiles):
        numbers = rule.count_rows_and_columns(np.asarray([size.height]), np.asarray([size.width]))
        rows, columns = int(numbers[0][0]), int(numbers[1][0])
    lines = "<|tile_x_separator|>" * (columns - 1) + "<|tile_y_separator|>" if rows * columns > 1 else ""
    return f"<|image_start|>{lines * rows}<|image|>{processor.img_patch_token}<|image_end|>"


def _write_paligemma(processor: Any, text: str) -> str:
    """Put the begin of the text behind the last image, and a line end behind all, as the processor does."""
    images, token, words = text.rpartition(processor.image_token)
    return f"{images}{token}{processor.tokenizer.bos_token}{words}\n" if token else text


def _write_smolvlm_video(processor: Any, size: VideoSize, scene: Scene) -> str:
    words = require("num2words", "video", "Counting videos for SmolVLM")
    clip = _Clip(size, scene.geometry.frames)
    length = timedelta(seconds=int(clip.duration))
    # Clips are padded to the longest one of the sample, and the text tells that number for each of them.
    number = words.num2words(max(len(_Clip(other, scene.geometry.frames)) for other in scene.sizes.videos))
    intro = f"You are provided the following series of {number} frames from a {length} [H:MM:SS] video.\n"
    frames = [
        f"\nFrame from {int(second // 60):02d}:{int(second % 60):02d}:"
        + _smolvlm_view(processor, _once(processor.image_token, place))
        for place, second in enumerate(clip.timestamps)
    ]
    return intro + "".join(frames) + "\n\n"


def _write_nemotron_video(processor: Any, size: VideoSize, scene: Scene) -> str:
    """Every layer follows the numbers and times of its frames; a frame's duration is cut to whole milliseconds."""
    clip, patch = _Clip(size, scene.geometry.frames), scene.geometry.frames.temporal_patch_size
    frame_ms = int(1000.0 / clip.fps)
    layers = []
    for layer, begin in enumerate(range(0, len(clip), patch)):
        labels = [
            f"{'Frame' if number == begin else 'frame'} {number + 1} sampled at "
            f"{clip.indices[number] * frame_ms / 1000.0:.2f} seconds"
            for number in range(begin, min(begin + patch, len(clip)))
        ]
        token = _once(processor.image_token, layer)
        layers.append(f"{' and '.join(labels)}: {processor.image_start_token}{token}{processor.image_end_token}")
    return "\n".join(layers)


_GEMMA3_IMAGE: Final = _apart("boi_token", "image_token", "eoi_token")
_GEMMA4_IMAGE: Final = _between("boi_token", "image_token", "eoi_token")
_GEMMA4_AUDIO: Final = _between("boa_token", "audio_token", "eoa_token")
# Families that are missing write nothing around that medium: its one token stays as the template wrote it.
IMAGE_TEXTS: Final[dict[str, Callable[[Any, ImageSize, Scene], str]]] = {
    "gemma3": _GEMMA3_IMAGE,
    "gemma3n": _GEMMA3_IMAGE,
    "gemma4": _GEMMA4_IMAGE,
    "gemma4_unified": _GEMMA4_IMAGE,
    "idefics3": _write_smolvlm_image,
    "internvl": _between("start_image_token", "image_token", "end_image_token"),
    "llama4": _write_llama4_image,
    "nemotron_h_omni": _between("image_start_token", "image_token", "image_end_token"),
    "smolvlm": _write_smolvlm_image,
}
VIDEO_TEXTS: Final[dict[str, Callable[[Any, VideoSize, Scene], str]]] = {
    "gemma4": _write_gemma4_video,
    "gemma4_unified": _write_gemma4_video,
    "glm46v": _write_glm46v_video,
    "internvl": _write_internvl_video,
    "kimi_k25": _write_kimi_video,
    "nemotron_h_omni": _write_nemotron_video,
    "qwen3_vl": _write_qwen3_video,
    "smolvlm": _write_smolvlm_video,
}
WHOLE_TEXTS: Final[dict[str, Callable[[Any, str], str]]] = {"paligemma": _write_paligemma}
"""What a family does to the whole text, once its media stand in it."""
AUDIO_TEXTS: Final[dict[str, Callable[[Any, AudioSize, Scene], str]]] = {
    "gemma3n": _apart("boa_token", "audio_token", "eoa_token"),
    "gemma4": _GEMMA4_AUDIO,
    "gemma4_unified": _GEMMA4_AUDIO,
    "nemotron_h_omni": _between("audio_start_token", "audio_token", "audio_end_token"),
}
