"""What users of a loader without packing write by hand: decode, call the processor, fill packs as samples come.

It leaves out label masking and multi-axis positions, which vlm_stream does too: the comparison favours the peers.
"""

from __future__ import annotations

import io
import json
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch

__all__ = ["build_real_processor", "encode_members", "next_fit"]

_FPS = 2.0


@cache
def build_real_processor() -> Any:
    """Return transformers' own Qwen2.5-VL processor with its published limits, and a small local tokenizer."""
    from vlm_stream.testing import build_processor

    return build_processor("qwen2_5_vl")


def encode_members(members: dict[str, bytes]) -> dict[str, torch.Tensor]:
    """Turn the members of a sample into tensors, as transformers documents it."""
    processor = build_real_processor()
    record = json.loads(members["json"])
    images, videos, details = [], [], []
    for name, content in members.items():
        if name.endswith(".jpg"):
            images.append(_image(content))
        elif name.endswith(".mp4"):
            frames, detail = _video(content)
            videos.append(frames)
            details.append(detail)
    messages = [_message(turn) for turn in record["messages"]]
    text = processor.apply_chat_template(messages, tokenize=False)
    more: dict[str, Any] = {}
    if videos:
        more = {"videos": videos, "videos_kwargs": {"do_sample_frames": False, "video_metadata": details}}
    if images:
        more["images"] = images
    return dict(processor(text=[text], return_tensors="pt", **more))


def next_fit(samples: Iterable[dict[str, torch.Tensor]], capacity: int) -> Iterator[dict[str, torch.Tensor]]:
    """Fill a pack until the next sample does not fit: pixels are too large to hold many samples back."""
    row: list[dict[str, torch.Tensor]] = []
    used = 0
    for sample in samples:
        length = sample["input_ids"].shape[1]
        if length > capacity:
            continue
        if used + length > capacity:
            yield _join(row)
            row, used = [], 0
        row.append(sample)
        used += length
    if row:
        yield _join(row)


def _join(row: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    import torch

    joined = {}
    for name in dict.fromkeys(name for sample in row for name in sample):
        parts = [sample[name] for sample in row if name in sample]
        if isinstance(parts[0], torch.Tensor):
            joined[name] = torch.cat(
                parts, dim=1 if name in ("input_ids", "attention_mask", "mm_token_type_ids") else 0
            )
    joined["position_ids"] = torch.cat([torch.arange(sample["input_ids"].shape[1]) for sample in row])
    return joined


def _message(turn: dict[str, str]) -> dict[str, Any]:
    text = turn["content"]
    content: list[dict[str, str]] = []
    while text.startswith(("<image>", "<video>")):
        content.append({"type": text[1:6]})
        text = text[7:]
    return {
        "role": turn["role"],
        "content": [*content, {"type": "text", "text": text}],
    }


def _image(content: bytes) -> Any:
    from PIL import Image

    image = Image.open(io.BytesIO(content))
    image.load()
    return image if image.mode == "RGB" else image.convert("RGB")


def _video(content: bytes) -> tuple[Any, dict[str, Any]]:
    import numpy as np
    import torch
    from decord import VideoReader

    reader = VideoReader(io.BytesIO(content), num_threads=1)
    total, fps = len(reader), float(reader.get_avg_fps())
    wanted = max(4, int(total / fps * _FPS) // 2 * 2)
    indices = np.linspace(0, total - 1, min(wanted, total)).round().astype(int).tolist()
    frames = torch.from_numpy(reader.get_batch(indices).asnumpy()).permute(0, 3, 1, 2)
    detail = {"fps": fps, "duration": total / fps, "total_num_frames": total, "frames_indices": indices}
    return frames, detail
