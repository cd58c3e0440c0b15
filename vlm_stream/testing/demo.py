"""The whole road on a laptop, offline: toy data -> shards -> plan -> packed batches -> training -> a resume.

`make demo` runs it. Every part is real (processor, shards, model, optimizer steps); only the data and the model are
tiny.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlm_stream.testing import torchvision_shim

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

__all__ = ["main"]

_PACK_SIZE = 2048


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo and print what each stage did."""
    parser = argparse.ArgumentParser(prog="python -m vlm_stream.testing.demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="folder to work in; emptied first")
    parser.add_argument("--samples", type=int, default=300, help="size of the toy dataset")
    parser.add_argument("--steps", type=int, default=8, help="training steps")
    args = parser.parse_args(argv)
    torchvision_shim.install()

    from rich.console import Console

    console = Console()
    shutil.rmtree(args.out, ignore_errors=True)
    shards, processor = _make_shards(args.out, args.samples, console)
    _train_and_resume(shards, processor, args.steps, console)
    console.print(f"Everything is in [bold]{args.out}/[/]. Next: README.md, then docs/design.md.")
    return 0


def _make_shards(out: Path, num_samples: int, console: Console) -> tuple[Path, Any]:
    from vlm_stream.commands.common import print_table
    from vlm_stream.commands.make_shards import summary
    from vlm_stream.shards import make_shards
    from vlm_stream.testing import build_processor, make_toy_dataset

    begin = time.perf_counter()
    meta = make_toy_dataset(out / "raw", num_samples=num_samples)
    processor = build_processor("qwen2_5_vl")
    processor.save_pretrained(out / "processor")
    console.rule("1. toy data")
    console.print(f"{num_samples} conversations with images, videos and text: {meta} ({_since(begin)})")

    console.rule("2. shards")
    begin = time.perf_counter()
    report = make_shards(meta, out / "shards", processor=str(out / "processor"), samples_per_shard=50)
    print_table(str(report.out), summary(report))
    console.print(f"tar + index + manifest in {out / 'shards'} ({_since(begin)})")
    return out / "shards", processor


def _train_and_resume(shards: Path, processor: Any, num_steps: int, console: Console) -> None:
    import torch
    from rich.table import Table

    from vlm_stream import StreamLoader
    from vlm_stream.testing import build_tiny_model

    console.rule("3. train on packed batches, then resume")
    settings: dict[str, Any] = {"processor": processor, "pack_size": _PACK_SIZE, "with_refs": True, "epochs": None}
    loader = StreamLoader(shards, num_workers=2, **settings)
    model = build_tiny_model("qwen2_5_vl", processor)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    table = Table("step", "samples", "tokens", "fill", "images", "loss", "seconds")
    state: dict[str, Any] = {}
    expected: list[Any] = []
    begin = time.perf_counter()
    for step, batch in enumerate(loader, start=1):
        refs = batch.pop("refs")
        if step > num_steps:
            expected = refs
            break
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        tokens = batch["input_ids"].numel()
        images = len(batch["image_grid_thw"]) if "image_grid_thw" in batch else 0
        now = time.perf_counter()
        counts = [str(step), str(sum(map(len, refs))), str(tokens), f"{tokens / _PACK_SIZE:.1%}", str(images)]
        table.add_row(*counts, f"{loss.item():.3f}", f"{now - begin:.2f}")
        begin = now
        state = loader.state_dict()
    console.print(table)

    resumed = StreamLoader(shards, num_workers=1, **settings)
    resumed.load_state_dict(state)
    begin = time.perf_counter()
    refs = next(iter(resumed)).pop("refs")
    same = "the same samples" if refs == expected else "OTHER SAMPLES: this is a defect"
    console.print(
        f"state after step {num_steps}: {_size(state)} of JSON; a new loader with another number of workers went on "
        f"with {same} as the first one, in {_since(begin)}."
    )
    if refs != expected:
        sys.exit(1)


def _size(state: dict[str, Any]) -> str:
    import json

    return f"{len(json.dumps(state))} bytes"


def _since(begin: float) -> str:
    return f"{time.perf_counter() - begin:.1f} s"


if __name__ == "__main__":
    sys.exit(main())
