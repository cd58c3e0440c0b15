"""Plans depend on counts, so a rule that counts otherwise than before changes the order of samples."""

from __future__ import annotations

import hashlib

import numpy as np

from vlm_stream.tokens import Geometry, MediaColumns, count_tokens
from vlm_stream.tokens.geometry import _RULES
from vlm_stream.tokens.rules.pieces import AnyresImage, FixedFrames

REQUIRED = {
    AnyresImage: {"pinpoints": ((384, 384), (384, 768), (768, 384), (768, 768))},
    FixedFrames: {"tokens_per_frame": 64, "patches_per_frame": 256},
}
# Golden: results of this code. Where they change, runs cannot be resumed.
GOLDEN = "6ca2233a75a1574d"


def numbers(count: int, low: int, high: int, salt: int) -> np.ndarray:
    """Return numbers that look random, and are the same with every numpy."""
    return low + (np.arange(count) * 2654435761 + salt * 40503) % 4294967291 % (high - low)


def columns(num_rows: int = 300) -> MediaColumns:
    splits = [np.concatenate([[0], np.cumsum(numbers(num_rows, 0, 3, salt))]) for salt in range(3)]
    images, videos, audios = (int(split[-1]) for split in splits)
    clips = [(1, 900), (28, 2000), (28, 1500)]
    return MediaColumns(
        text_tokens=numbers(num_rows, 1, 3000, 4),
        label_tokens=np.full(num_rows, -1),
        image_splits=splits[0],
        image_sizes=np.stack([numbers(images, 28, 3000, salt) for salt in (5, 6)], axis=1),
        video_splits=splits[1],
        video_sizes=np.stack([numbers(videos, *limits, salt) for salt, limits in enumerate(clips)], axis=1),
        video_fps=np.array([0.0, 12.5, 24.0, 30.0])[numbers(videos, 0, 4, 7)],
        video_seconds=numbers(videos, 0, 6000, 8) / 100,
        video_picked=np.array([0, 0, 0, 7])[numbers(videos, 0, 4, 9)],
        audio_splits=splits[2],
        audio_sizes=np.stack(
            [numbers(audios, 400, 10**6, 10), np.array([8000, 16000, 44100])[numbers(audios, 0, 3, 11)]], axis=1
        ),
    )


def test_counts_stay_what_they_are():
    digest = hashlib.sha256()
    for kind in (_RULES[name] for name in sorted(_RULES.keys() - {"Measured"})):
        rule = kind(**REQUIRED.get(kind, {}))
        media = {medium: rule for medium in ("image", "video", "audio") if hasattr(rule, f"count_{medium}s")}
        counted = count_tokens(columns(), Geometry(family="any", **media))
        for name in ("tokens", "vision_tokens", "vision_patches"):
            digest.update(getattr(counted, name).astype("<i8").tobytes())
        digest.update(np.rint(counted.vision_squares).astype("<i8").tobytes())
    assert digest.hexdigest()[:16] == GOLDEN
