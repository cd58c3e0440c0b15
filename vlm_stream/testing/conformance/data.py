"""Toy shards for conformance: images and text, some samples longer than others, counted exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

__all__ = ["PACK_SIZE", "make_data", "open_processor"]

PACK_SIZE: Final = 900
_SAMPLES: Final = 80
_LIMITS: Final = {"size": {"shortest_edge": 4 * 28 * 28, "longest_edge": 16 * 28 * 28}}


def make_data(folder: str | Path) -> Path:
    """Write shards and a processor for `check` and `Run` into a folder, unless they are there; return the folder.

    The epoch of two ranks with two micro-batches a step has six steps, and the last of them is not full.
    """
    from vlm_stream.convert import make_shards
    from vlm_stream.testing.processors import build_processor
    from vlm_stream.testing.toy_dataset import make_toy_dataset

    folder = Path(folder)
    if (folder / "shards" / "dataset.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    processor = build_processor("qwen2_5_vl", image=_LIMITS, video=_LIMITS | {"cap_pixels_per_frame": False})
    processor.save_pretrained(folder / "processor")
    meta = make_toy_dataset(folder / "toy", num_samples=_SAMPLES)
    make_shards(
        meta,
        folder / "shards",
        processor=str(folder / "processor"),
        names=("captions", "dialogues"),
        samples_per_shard=10,
    )
    return folder


def open_processor(folder: Path) -> Any:
    """Return the processor that `make_data` wrote."""
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(folder / "processor")  # type: ignore[no-untyped-call]
