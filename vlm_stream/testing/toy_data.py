"""Toy data: `make_toy_dataset` takes a folder and a seed and writes media files, data files and a meta file.

<folder>/meta.json         three entries, in three forms
<folder>/captions.jsonl    role/content messages; one image, several images, system turns
<folder>/dialogues.json    a JSON array; conversations/from/value through columns and tags; several turns, text only
<folder>/clips.jsonl       videos, frame picks, videos beside images, text only
<folder>/media/            JPEG and PNG files of many sizes, a few mp4 clips
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from vlm_stream.errors import ConfigError
from vlm_stream.testing.toy_media import (
    ClipSpec,
    make_grey_jpeg,
    make_jpeg,
    make_mp4,
    make_palette_png,
    make_png_with_alpha,
)

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
