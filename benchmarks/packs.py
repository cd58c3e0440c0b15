"""What packing costs in a loader worker: positions and joining, for a row of 8k tokens.

Run by hand: `python benchmarks/packs.py`. All figures are from one run on one thread; read the ratios.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from vlm_stream.collate import ModelPositions, PositionRule, WeightlessPositions, build_hf_pack
from vlm_stream.testing import build_processor, build_tiny_model

if TYPE_CHECKING:
    from collections.abc import Callable

DOCUMENTS = 16
GRID = [1, 32, 40]  # an image of 448 x 560: 320 tokens, 1280 patches
TEXT = 192


def make_sample(image_token: int) -> dict[str, Any]:
    """Return an encoded sample of text around one image."""
    tokens = GRID[1] * GRID[2] // 4
    types = torch.tensor([0] * (TEXT // 2) + [1] * tokens + [0] * (TEXT // 2))
    ids = torch.where(types == 1, image_token, 50)
    pixels = torch.zeros(GRID[1] * GRID[2], 1176)
    rows = {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids), "mm_token_type_ids": types}
    return {**rows, "image_grid_thw": torch.tensor([GRID]), "pixel_values": pixels}


def milliseconds(run: Callable[[], Any], repeats: int = 20) -> float:
    """Return the best of several runs."""
    run()
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - begin)
    return best * 1e3


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    processor = build_processor("qwen2_5_vl")
    model = build_tiny_model("qwen2_5_vl", processor)
    samples = [make_sample(model.config.image_token_id) for _ in range(DOCUMENTS)]
    rule = PositionRule.from_config(model.config)
    rules = {
        "rule": rule,
        "model": ModelPositions(model.model.get_rope_index),
        "class": WeightlessPositions(model.config),
    }
    length = sum(len(sample["input_ids"]) for sample in samples)
    print(f"{DOCUMENTS} documents, {length} tokens")
    times = {name: milliseconds(lambda r=r: [r(sample) for sample in samples]) for name, r in rules.items()}
    for name, ms in times.items():
        print(f"positions by the {name:6} {ms:8.2f} ms  {ms / times['rule']:5.2f} x")
    bare = [{k: v for k, v in sample.items() if k != "pixel_values"} for sample in samples]
    for name, what in (("without pixels", bare), ("with pixels", samples)):
        ms = milliseconds(lambda what=what: build_hf_pack(what, positions=rule))
        print(f"build_hf_pack {name:15} {ms:8.2f} ms  {ms / times['rule']:5.2f} x")
    masked = milliseconds(lambda: build_hf_pack(bare, positions=rule, attention="mask4d_bool"), 3)
    print(f"build_hf_pack with a 4-D mask {masked:8.2f} ms  {masked / times['rule']:5.2f} x")


if __name__ == "__main__":
    main()
