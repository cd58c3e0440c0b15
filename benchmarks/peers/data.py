"""The data of the comparison: conversations with the published means, seeded, written once as JSONL and media files.

`images` are 15 % text only, 53 % one natural image, 23 % one document image and 9 % two to six images, with lognormal
lengths and sizes. Of `clips` a fifth are clips of 5 to 300 s instead. `small` are images of a tenth of the size, for
where their bytes do not matter. Media come from a small pool, so that a thousand samples take seconds to make; every
loader copies them into its own files, so no loader profits from the repetition. No sample is longer than a pack.
"""

from __future__ import annotations

import io
import json
import math
import random
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

__all__ = ["Record", "make_raw", "read_raw"]

_WORDS = (
    "the picture shows a small river between two hills with trees and houses on both sides while people walk along "
    "its bank under grey clouds near an old bridge where boats wait for evening light and children play by water"
).split()


@dataclass(frozen=True)
class Record:
    """One sample before it is written: its key, its text as JSON, its media files in order."""

    file: Path
    """The raw file that it comes from."""
    key: str
    text: bytes
    media: tuple[tuple[str, Path], ...]
    """Member names (`0.jpg`, `1.mp4`) with their files."""

    def members(self) -> dict[str, bytes]:
        """Return every member's bytes, the text as `json`."""
        return {"json": self.text} | {name: path.read_bytes() for name, path in self.media}


_KINDS = {"text": 14, "natural": 50, "document": 22, "several": 8}
_CLIPS_S = (5, 5, 10, 10, 20, 30, 60, 120, 300)
_CLIP_SHARE = 0.2


def make_raw(folder: Path, mixture: str, num_samples: int) -> Path:
    """Write a JSONL file of records, and their media beside it; return the file. Done before: left as it is."""
    file = folder / f"{mixture}-{num_samples}.jsonl"
    if file.exists():
        return file
    rng = random.Random(0)
    pool = _make_media(folder / f"media-{mixture}", mixture)
    lines = [json.dumps(_sample(number, rng, pool)) for number in range(num_samples)]
    part = file.with_suffix(".part")
    part.write_text("\n".join(lines) + "\n", encoding="utf-8")
    part.rename(file)
    return file


def read_raw(file: Path) -> Iterator[Record]:
    """Yield the records of a raw file."""
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            sample = json.loads(line)
            names = sample.get("images", []) + sample.get("videos", [])
            media = tuple((f"{place}{Path(name).suffix}", file.parent / name) for place, name in enumerate(names))
            yield Record(file=file, key=f"{number:08d}", text=line.encode(), media=media)


def _sample(number: int, rng: random.Random, pool: dict[str, list[str]]) -> dict[str, object]:
    is_clip = bool(pool["video"]) and rng.random() < _CLIP_SHARE
    kind = "video" if is_clip else rng.choices(list(_KINDS), list(_KINDS.values()))[0]
    images: list[str] = []
    videos: list[str] = []
    if kind == "several":
        images = [rng.choice(pool["natural"]) for _ in range(rng.randint(2, 6))]
    elif kind == "video":
        videos = [rng.choice(pool["video"])]
    elif kind != "text":
        images = [rng.choice(pool[kind])]
    median, sigma = {
        "text": (450, 0.9),
        "natural": (180, 0.8),
        "document": (250, 1.0),
        "several": (250, 0.8),
        "video": (200, 0.8),
    }[kind]
    num_words = min(1200, max(4, round(rng.lognormvariate(math.log(median), sigma))))
    question = "<image>" * len(images) + "<video>" * len(videos) + " ".join(rng.choices(_WORDS, k=num_words // 4 + 1))
    answer = " ".join(rng.choices(_WORDS, k=num_words - num_words // 4))
    sample: dict[str, object] = {
        "id": f"{number:08d}",
        "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}],
    }
    if images:
        sample["images"] = images
    if videos:
        sample["videos"] = videos
    return sample


def _make_media(folder: Path, mixture: str) -> dict[str, list[str]]:
    """Return the names of pictures and clips, relative to the raw file; they are made the first time."""
    import numpy as np

    from vlm_stream.testing import make_mp4

    rng = np.random.default_rng(0)
    scale = 0.1 if mixture == "small" else 1.0
    makers = {
        f"natural-{number:03d}.jpg": lambda: _natural(rng, scale * rng.lognormal(math.log(640), 0.25))
        for number in range(60)
    }
    makers |= {
        f"document-{number:03d}.jpg": lambda: _document(rng, scale * min(2200, rng.lognormal(math.log(1400), 0.45)))
        for number in range(30)
    }
    if mixture == "clips":
        makers |= {
            f"video-{number}.mp4": partial(make_mp4, num_frames=seconds * 10, height=240, width=320, fps=10, gop=20)
            for number, seconds in enumerate(_CLIPS_S)
        }
    if not folder.exists():
        part = folder.with_suffix(".part")
        part.mkdir(parents=True)
        for name, make in makers.items():
            (part / name).write_bytes(make())
        part.rename(folder)
    names = [f"{folder.name}/{name}" for name in makers]
    return {kind: [name for name in names if f"/{kind}-" in name] for kind in ("natural", "document", "video")}


def _jpeg(pixels: np.ndarray, quality: int) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


def _natural(rng: np.random.Generator, long_side: float) -> bytes:
    """Large smooth shapes, finer ones, and grain: it compresses about as a photograph does."""
    import numpy as np
    from PIL import Image

    width, height = round(long_side), round(long_side * rng.uniform(0.6, 0.8))
    total = np.zeros((height, width, 3), np.float32)
    for cells, strength in ((4, 80.0), (24, 40.0), (120, 25.0)):
        coarse = rng.integers(0, 256, (cells, cells, 3), dtype=np.uint8)
        total += (np.asarray(Image.fromarray(coarse).resize((width, height)), np.float32) - 128) * strength / 128
    total += 128 + rng.normal(0, 9, total.shape).astype(np.float32)
    return _jpeg(total.clip(0, 255).astype(np.uint8), 92)


def _document(rng: np.random.Generator, long_side: float) -> bytes:
    """Dark runs on white in lines, as printed text."""
    import numpy as np

    width, height = max(100, round(long_side * 0.75)), round(long_side)
    page = np.full((height, width), 245, np.float32)
    for top in range(40, height - 30, 18):
        marks = np.kron(rng.random((3, (width - 80) // 4)) < 0.35, np.ones((3, 4), bool))
        page[top : top + 9, 40 : 40 + marks.shape[1]][marks] = 25
    page += rng.normal(0, 1, page.shape)
    return _jpeg(np.repeat(page.clip(0, 255).astype(np.uint8)[..., None], 3, axis=2), 80)
