"""Toy data: a dataset of every kind of sample on disk, and samples in memory with a real processor's answer to them.

`make_toy_dataset` takes a folder and a seed and writes media files, data files and a meta file:

<folder>/meta.json         three entries, in three forms
<folder>/captions.jsonl    role/content messages; one image, several images, system turns
<folder>/dialogues.json    a JSON array; conversations/from/value through columns and tags; several turns, text only
<folder>/clips.jsonl       videos, frame picks, videos beside images, text only
<folder>/media/            JPEG and PNG files of many sizes, a few mp4 clips
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vlm_stream.errors import ConfigError
from vlm_stream.testing.families import FAMILY_PARTS
from vlm_stream.testing.toy_media import (
    ClipSpec,
    make_grey_jpeg,
    make_jpeg,
    make_mp4,
    make_palette_png,
    make_png_with_alpha,
    make_toy_wave,
)
from vlm_stream.tokens import AudioSize, ImageSize, MediaSizes, VideoSize, frame_indices, make_video_metadata

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vlm_stream.conversation import Conversation
    from vlm_stream.tokens import FrameRule

__all__ = ["MEDIA_OF_FAMILY", "ToySample", "encode_toy_sample", "make_toy_dataset", "make_toy_sample"]

_WORDS: Final = (
    "the a red blue small large square circle line street house river chart table shows has with above below left "
    "right of two three seven people signs windows and but while slowly then again bright dark value total"
)
_SIDES: Final = (28, 56, 64, 96, 100, 127, 160, 224, 256, 320, 333, 448)
_CLIPS: Final = (
    ClipSpec(num_frames=2, height=48, width=64, fps=4.0),
    ClipSpec(num_frames=12, height=64, width=96, fps=8.0, seed=1),
    ClipSpec(num_frames=24, height=96, width=64, fps=12.5, seed=2, with_audio=True),
    ClipSpec(num_frames=40, height=56, width=56, fps=10.0, seed=3, variable_rate=True),
)
_TAGS: Final = {"role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt"}


@dataclass(frozen=True, slots=True)
class _Toys:
    """The dataset under construction: the generator that decides everything, and the files so far."""

    folder: Path
    rng: np.random.Generator

    def say(self, least: int, most: int) -> str:
        words = self.rng.choice(_WORDS.split(), int(self.rng.integers(least, most + 1)))
        return " ".join(str(word) for word in words).capitalize() + "."

    def add_image(self, stem: str) -> str:
        height, width = (int(side) for side in self.rng.choice(_SIDES, 2))
        kind = self.rng.integers(0, 12)
        makers: dict[int, tuple[Callable[..., bytes], str]] = {
            0: (make_png_with_alpha, "png"),
            1: (make_palette_png, "png"),
            2: (make_grey_jpeg, "jpg"),
        }
        make, ending = makers.get(int(kind), (make_jpeg, "jpg"))
        name = f"{stem}.{ending}"
        (self.folder / "media" / name).write_bytes(make(height, width, int(self.rng.integers(2**31))))
        return name


def make_toy_dataset(folder: str | Path, num_samples: int = 200, seed: int = 0) -> Path:
    """Write a toy dataset and return the path of its meta file.

    The same arguments give the same bytes. The first samples of each entry show all its kinds, so a dataset of a dozen
    samples has images, videos, several turns and plain text.

    Args:
        folder: Created if it does not exist.
        num_samples: Samples of all entries together, at least 3.
        seed: Chooses texts, sizes and pictures.

    Example:
        >>> import tempfile
        >>> meta = make_toy_dataset(tempfile.mkdtemp(), num_samples=12)
        >>> sorted(json.loads(meta.read_text()))
        ['captions', 'clips', 'dialogues']
    """
    if num_samples < 3:
        raise ConfigError(f"A toy dataset has three entries, and {num_samples} samples do not fill them: ask for 3.")
    folder = Path(folder)
    (folder / "media").mkdir(parents=True, exist_ok=True)
    toys = _Toys(folder, np.random.default_rng(seed))
    for number, clip in enumerate(_CLIPS):
        (folder / "media" / f"clip-{number}.mp4").write_bytes(make_mp4(clip))
    num_clips = max(1, num_samples // 8)
    num_captions = max(1, num_samples // 2)
    num_dialogues = max(1, num_samples - num_captions - num_clips)
    num_captions = num_samples - num_dialogues - num_clips
    _write_jsonl(folder / "captions.jsonl", [_make_caption(toys, number) for number in range(num_captions)])
    _write_json(folder / "dialogues.json", [_make_dialogue(toys, number) for number in range(num_dialogues)])
    _write_jsonl(folder / "clips.jsonl", [_make_clip_sample(toys, number) for number in range(num_clips)])
    meta = {
        "captions": {"file_name": "captions.jsonl", "media_dir": "media"},
        "dialogues": {
            "file_name": "dialogues.json",
            "columns": {"messages": "conversations", "images": "image"},
            "tags": _TAGS,
            "media_dir": "media",
        },
        "clips": {"file_name": "clips.jsonl", "media_dir": "media"},
    }
    return _write_json(folder / "meta.json", meta)


def _make_caption(toys: _Toys, number: int) -> dict[str, Any]:
    num_images = (1, 3, 1, 2)[number % 4]
    images = [toys.add_image(f"caption-{number:06d}-{place}") for place in range(num_images)]
    question = "<image>" * num_images + "\n" + toys.say(3, 12)
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": toys.say(4, 60)}]
    if number % 3 == 2:
        messages.insert(0, {"role": "system", "content": toys.say(3, 9)})
    return {"id": f"caption-{number}", "messages": messages, "images": images}


def _make_dialogue(toys: _Toys, number: int) -> dict[str, Any]:
    images = [toys.add_image(f"dialogue-{number:06d}")] if number % 3 else []
    turns = []
    for turn in range(1 + number % 4):
        question = toys.say(2, 10)
        if images and turn == 0:
            question = f"{question} <image>" if number % 2 else f"<image>\n{question}"
        turns += [{"from": "human", "value": question}, {"from": "gpt", "value": toys.say(3, 80)}]
    return {"id": f"dialogue-{number}", "conversations": turns, "image": images}


def _make_clip_sample(toys: _Toys, number: int) -> dict[str, Any]:
    sample: dict[str, Any] = {"images": [], "videos": []}
    question = toys.say(3, 8)
    if number % 5 != 3:
        clip: Any = f"clip-{number % len(_CLIPS)}.mp4"
        if number % 5 == 2:
            clip = {"path": clip, "frame_indices": [0, 5, 10, 20]}
        sample["videos"] = [clip]
        question = f"<video>{question}"
    if number % 5 == 4:
        sample["images"] = [toys.add_image(f"clip-{number:06d}")]
        question = f"<image>{question}"
    sample["messages"] = [{"role": "user", "content": question}, {"role": "assistant", "content": toys.say(4, 40)}]
    return sample


def _write_json(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    return path


def _write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


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
    """Run a real processor on a sample; clips become black frames, those of the rule.

    The processor is told their times and samples nothing itself.
    """
    metadata: list[dict[str, Any]] = []
    messages = [
        {**message, "content": [_decode_clip(item, rule, metadata) for item in message["content"]]}
        for message in sample.conversation
    ]
    options: dict[str, Any] = {}
    if metadata:
        options = {"do_sample_frames": False, "video_metadata": metadata}
        if type(processor).__name__.startswith("NemotronH_Omni"):  # reads the metadata of its only clip, as an object
            from transformers.video_utils import VideoMetadata

            options["video_metadata"] = VideoMetadata(**metadata[0])
    call = processor.apply_chat_template
    if "processor_kwargs" in signature(call).parameters:  # since 5.0; before, options stand beside the others
        options = {"processor_kwargs": options}
    if processor.chat_template is None:  # Phi-4's class loses it on loading
        options["chat_template"] = processor.tokenizer.chat_template
    return dict(call([messages], tokenize=True, return_dict=True, return_tensors="pt", **options))


def _decode_clip(item: dict[str, Any], rule: FrameRule, metadata: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a clip's item with frames instead of its size, and note what the processor is to be told of it."""
    if item["type"] != "video":
        return item
    size: VideoSize = item["video"]
    indices = frame_indices(size.frames, size.fps, rule, size.picked or None)
    metadata.append(make_video_metadata(size.frames, size.fps, size.seconds, indices))
    return {"type": "video", "video": np.zeros((len(indices), size.height, size.width, 3), np.uint8)}
