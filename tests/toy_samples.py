"""Samples in memory, with what headers would say of their media, and a real processor's answer to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vlm_stream.testing.families import FAMILY_PARTS
from vlm_stream.testing.toy_media import make_toy_wave
from vlm_stream.tokens import AudioSize, ImageSize, MediaSizes, VideoSize, encode_pixels

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vlm_stream.conversation import Conversation
    from vlm_stream.tokens import FrameRule

MEDIA_OF_FAMILY: Final = {
    name: ("image", *(kind for kind in ("video", "audio") if getattr(family, kind) is not None))
    for name, family in FAMILY_PARTS.items()
}
"""What each family of `build_processor` reads."""

_RATE: Final = 16000
_TEXTS: Final = (
    "What is in this?",
    "\nDescribe it, please.\n\n",
    "  Which colour has the second square?  ",
    "12.5 seconds, then 00:01 again: 3,650!",
    "Ein Bild, größer als 42 µm — naïve 図 🙂",
    "",
    "\n\n\n",
    "<0.3 seconds> is typed by hand",
)


@dataclass(frozen=True, slots=True)
class ToySample:
    """A conversation with decoded media, and what headers would say of them."""

    conversation: Conversation
    """Image items hold [height, width, 3] pixels, video items a `VideoSize`, audio items a wave."""
    sizes: MediaSizes
    """Sizes of the media, in the order of the conversation."""


def make_toy_sample(rng: np.random.Generator, kinds: Sequence[str], *, max_side: int = 700) -> ToySample:
    """Make a sample of one to three turns with up to three media of the given kinds (or none).

    Sizes are odd on purpose: tiny, long, tall, and rates and lengths that divide badly.
    """
    plan = rng.choice(["none", "one", "one", "several"])
    num_media = {"none": 0, "one": 1}.get(str(plan), int(rng.integers(2, 4)))
    chosen = [str(kind) for kind in rng.choice(list(kinds), num_media)]
    if chosen.count("video") > 1:  # one clip is enough to be slow
        chosen = ["video", *[kind for kind in chosen if kind != "video"]]
    images: list[ImageSize] = []
    videos: list[VideoSize] = []
    audios: list[AudioSize] = []
    items: list[dict[str, Any]] = []
    for kind in chosen:
        if kind == "image":
            images.append(_draw_image_size(rng, max_side))
            shape = (images[-1].height, images[-1].width, 3)
            items.append({"type": "image", "image": rng.integers(0, 256, shape, dtype=np.uint8)})
        elif kind == "video":
            videos.append(_draw_video_size(rng))
            items.append({"type": "video", "video": videos[-1]})
        else:
            audios.append(AudioSize(samples=int(rng.integers(400, 40000)), rate=_RATE))
            items.append({"type": "audio", "audio": make_toy_wave(audios[-1].samples, _RATE)})
    sizes = MediaSizes(images=tuple(images), videos=tuple(videos), audios=tuple(audios))
    return ToySample(_converse(rng, items), sizes)


def _draw_image_size(rng: np.random.Generator, max_side: int) -> ImageSize:
    height, width = (int(side) for side in np.exp(rng.uniform(np.log(24), np.log(max_side), 2)))
    return ImageSize(height=height, width=width)


def _draw_video_size(rng: np.random.Generator) -> VideoSize:
    frames = int(rng.choice([1, 2, 3, 5, 8, 13, 40, 100]))
    fps = float(rng.choice([0.5, 2.0, 7.3, 24.0, 30000 / 1001]))
    height, width = (int(side) for side in rng.integers(20, 200, 2))
    picked = tuple(int(index) for index in np.sort(rng.integers(0, frames, 3))) if rng.random() < 0.2 else ()
    return VideoSize(frames=frames, height=height, width=width, fps=fps, seconds=frames / fps, picked=picked)


def _converse(rng: np.random.Generator, items: list[dict[str, Any]]) -> Conversation:
    turns: Conversation = []
    if rng.random() < 0.3:
        turns.append({"role": "system", "content": [{"type": "text", "text": "You are brief."}]})
    num_rounds = int(rng.integers(1, 4))
    cuts = np.sort(rng.integers(0, len(items) + 1, num_rounds - 1)).tolist()
    for begin, end in zip([0, *cuts], [*cuts, len(items)], strict=True):
        content = list(items[begin:end])
        text = {"type": "text", "text": str(rng.choice(_TEXTS))}
        content.insert(int(rng.integers(0, len(content) + 1)), text)
        turns.append({"role": "user", "content": content})
        turns.append({"role": "assistant", "content": [{"type": "text", "text": str(rng.choice(_TEXTS))}]})
    return turns


def encode_toy_sample(processor: Any, sample: ToySample, rule: FrameRule) -> dict[str, Any]:
    """Run a real processor on a sample; frames are those of the rule, and the processor samples nothing itself."""
    return encode_pixels(processor, sample.conversation, rule)
