"""What users of other loaders write by hand: decode, call the processor, fill packs as samples come.

It leaves out label masking and multi-axis positions, which vlm_stream does too: the comparison favours the peers. A
sample is a dict with its `key`, its `length` in tokens, and tensors; a pack has `keys`, `lengths` and these joined.
"""

from __future__ import annotations

import io
import json
import pickle
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any

from benchmarks.peers.loaders.base import Run

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from benchmarks.peers.loaders.base import Loader, Opening

__all__ = ["CAPACITY", "FPS", "MAX_FRAMES", "HandPacked", "build_real_processor", "encode_members", "join", "next_fit"]

CAPACITY = 8192
FPS, MAX_FRAMES = 2.0, 32
Sample = dict[str, Any]


@cache
def build_real_processor() -> Any:
    """Return transformers' own Qwen2.5-VL processor with its published limits, and a small local tokenizer."""
    from vlm_stream.testing import build_processor

    return build_processor("qwen2_5_vl")


def encode_members(members: dict[str, bytes]) -> Sample:
    """Turn the members of a sample into tensors, as transformers documents it."""
    import torch

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
    encoded = processor(text=[text], return_tensors="pt", **more)
    tensors = {name: value for name, value in encoded.items() if isinstance(value, torch.Tensor)}
    return {"key": str(members["__key__"]), "length": encoded["input_ids"].shape[1], **tensors}


def next_fit(samples: Iterable[Sample], capacity: int) -> Iterator[Sample]:
    """Fill a pack until the next sample does not fit: pixels are too large to hold many samples back."""
    row: list[Sample] = []
    for sample in samples:
        if row and sum(each["length"] for each in row) + sample["length"] > capacity:
            yield join(row)
            row = []
        row.append(sample)
    if row:
        yield join(row)


def join(row: list[Sample]) -> Sample:
    """Return samples as one pack."""
    import torch

    pack: Sample = {"keys": [sample["key"] for sample in row], "lengths": [sample["length"] for sample in row]}
    for name in dict.fromkeys(name for sample in row for name in sample if isinstance(sample[name], torch.Tensor)):
        parts = [sample[name] for sample in row if name in sample]
        along = 1 if name in ("input_ids", "attention_mask", "mm_token_type_ids") else 0
        pack[name] = torch.cat(parts, dim=along)
    if "input_ids" in pack:
        pack["position_ids"] = torch.cat([torch.arange(length) for length in pack["lengths"]])
    return pack


class HandPacked(Run):
    """Packs by next fit in the trainer, of a loader that has none. Saved are its state and samples not yet handed out.

    Samples left over by the ranks that were saved are shared out to those that go on.
    """

    def __init__(self, loader: Loader, opening: Opening, capacity: int, states: Sequence[bytes]) -> None:
        saved = [pickle.loads(state) for state in states]
        self._left = [sample for _, left in saved[opening.rank :: opening.world_size] for sample in left]
        self._run = loader.open(opening, loader.merge([state for state, _ in saved], opening.rank) if saved else None)
        self._capacity = capacity

    def __iter__(self) -> Iterator[Sample]:
        for batch in chain([[]], self._run):
            self._left += batch
            while (end := self._end_of_pack()) is not None:
                row, self._left = self._left[:end], self._left[end:]
                yield join(row)
        if self._left:
            row, self._left = self._left, []
            yield join(row)

    def _end_of_pack(self) -> int | None:
        used = 0
        for place, sample in enumerate(self._left):
            used += sample["length"]
            if place and used > self._capacity:
                return place
        return None

    def state(self) -> bytes:
        """Return the loader's state, and the samples that wait for a pack."""
        return pickle.dumps((self._run.state(), self._left))

    def close(self) -> None:
        """Stop the loader."""
        self._run.close()

    def worker_pids(self) -> list[int]:
        """Return the loader's."""
        return self._run.worker_pids()


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
    import torch
    from decord import VideoReader

    from vlm_stream.tokens import FrameRule, frame_indices

    reader = VideoReader(io.BytesIO(content), num_threads=1)
    total, fps = len(reader), float(reader.get_avg_fps())
    indices = frame_indices(total, fps, FrameRule(fps=FPS, max_frames=MAX_FRAMES)).tolist()
    frames = torch.from_numpy(reader.get_batch(indices).asnumpy()).permute(0, 3, 1, 2)
    detail = {"fps": fps, "duration": total / fps, "total_num_frames": total, "frames_indices": indices}
    return frames, detail
