"""The whole road on a laptop, offline: toy data -> shards -> plan -> packed training -> a killed worker -> a resume.

`make demo` runs it. Every part is real (processor, shards, model, optimizer steps, kill -9); only the data and the
model are tiny.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vlm_stream.testing import torchvision_shim

if TYPE_CHECKING:
    from rich.console import Console

_PACK_SIZE: Final = 2048
_LIMITS: Final = {"size": {"shortest_edge": 4 * 28 * 28, "longest_edge": 256 * 28 * 28}}
_KILL_AT: Final = 4
_NEXT_WORLD: Final = 3

_SIZE: Final = (1000, 620)
_MAX_PACKS: Final = 20
_TEXT: Final = (90, 120, 190)
_VISION: Final = (235, 150, 60)
_EMPTY: Final = (232, 232, 232)
_INK: Final = (40, 40, 40)
_KINDS: Final = {"image and video": _VISION, "text": _TEXT, "learned": (31, 138, 76), "padding": _EMPTY}
_NAMES: Final = {"vision": "image and video", "text": "text", "label": "learned", "pad": "padding"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo and print what each stage did."""
    parser = argparse.ArgumentParser(prog="python examples/demo.py", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="folder to work in; emptied first")
    parser.add_argument("--samples", type=int, default=300, help="size of the toy dataset")
    parser.add_argument("--steps", type=int, default=8, help="training steps before the resume")
    args = parser.parse_args(argv)
    torchvision_shim.install()

    from rich.console import Console

    console = Console()
    shutil.rmtree(args.out, ignore_errors=True)
    shards, processor = _make_shards(args.out, args.samples, console)
    _show_plan(shards, args.out / "plan.png", console)
    state, seen = _train(shards, processor, args.steps, console)
    good = _finish_with_other_ranks(shards, processor, state, seen, args.samples, console)
    _show_pack(shards, processor, args.out)
    console.print(
        f"Everything is in [bold]{args.out}/[/]. A pack, drawn: {args.out / 'pack.png'}; with its samples: "
        f"{args.out / 'pack.html'}. Next: README.md, docs/design.md.",
        soft_wrap=True,
    )
    tool = Path(os.path.relpath(Path(sys.executable).parent / "vlm-stream"))
    command = f"{tool} view {shards} --processor {args.out / 'processor'} --pack-size {_PACK_SIZE}"
    console.print(f"To look at all of it in a browser: [bold]{command}[/]", soft_wrap=True)
    return 0 if good else 1


def _make_shards(out: Path, num_samples: int, console: Console) -> tuple[Path, Any]:
    from vlm_stream.commands.make_shards import summary
    from vlm_stream.commands.output import print_table
    from vlm_stream.convert import make_shards
    from vlm_stream.testing import build_processor, make_toy_dataset

    console.rule("1. toy data")
    begin = time.perf_counter()
    meta = make_toy_dataset(out / "raw", num_samples=num_samples)
    processor = build_processor("qwen2_5_vl", image=_LIMITS, video=_LIMITS | {"cap_pixels_per_frame": False})
    processor.save_pretrained(out / "processor")
    console.print(f"{num_samples} conversations with images, videos and text: {meta} ({_since(begin)})")

    console.rule("2. shards: tar + index + manifest")
    report = make_shards(meta, out / "shards", processor=str(out / "processor"), samples_per_shard=50)
    print_table(str(out / "shards"), summary(report))
    return out / "shards", processor


def _show_plan(shards: Path, picture: Path, console: Console) -> None:
    import numpy as np

    from vlm_stream.options import StreamOptions
    from vlm_stream.plan import plan_report
    from vlm_stream.planning import open_plan
    from vlm_stream.recipe import normalise_sources

    console.rule("3. the plan, from the index alone")
    options = StreamOptions(pack_size=_PACK_SIZE)
    planner = open_plan(normalise_sources(shards), options).planner
    report = plan_report(planner, options.shape(1))
    sizes = enumerate(planner.sources[0].samples_per_shard)
    columns = [planner.read_columns(0, [shard]).pick(np.arange(size)) for shard, size in sizes]
    packs = []
    for step in planner.steps(options.shape(1)):
        refs = [ref for row in step.refs(0, 0) for ref in row]
        packs.append([(int(columns[r.shard].tokens[r.row]), int(columns[r.shard].vision_tokens[r.row])) for r in refs])
    _draw_plan(picture, [tokens for pack in packs for tokens, _ in pack], packs, _PACK_SIZE)
    console.print(
        f"{report.samples} samples, {report.tokens:,} tokens -> {report.packs} packs of {_PACK_SIZE} (no fewer than "
        f"{report.packs_lower_bound} are possible), {report.fill:.1%} full. Picture: {picture}"
    )


def _show_pack(shards: Path, processor: Any, out: Path) -> None:
    from vlm_stream.options import StreamOptions
    from vlm_stream.recipe import normalise_sources
    from vlm_stream.view import Viewer, show_step

    viewer = Viewer(normalise_sources(shards), StreamOptions(pack_size=_PACK_SIZE), processor)
    view = viewer.book.view(viewer.book.base, 0, 0, is_built=True)
    show_step(viewer, view).save(out / "pack.html")
    _draw_pack(out / "pack.png", view.micro_batches[0][0].runs, _PACK_SIZE)
    viewer.close()


def _train(shards: Path, processor: Any, num_steps: int, console: Console) -> tuple[dict[str, Any], list[str]]:
    import torch
    from rich.table import Table

    from vlm_stream import StreamLoader
    from vlm_stream.testing import build_tiny_model

    console.rule(f"4. train; one worker is killed (-9) after step {_KILL_AT}")
    loader = StreamLoader(shards, processor=processor, pack_size=_PACK_SIZE, with_refs=True, num_workers=2)
    model = build_tiny_model("qwen2_5_vl", processor)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    table = Table("step", "samples", "tokens", "fill", "images", "loss", "seconds")
    seen: list[str] = []
    begin = time.perf_counter()
    for step, batch in enumerate(loader, start=1):
        refs = batch.pop("refs")
        seen += [name[2] for row in refs for name in row]
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
        if step == _KILL_AT:
            os.kill(loader.worker_pids()[0], signal.SIGKILL)
        if step == num_steps:
            break
    console.print(table)
    numbers = loader.metrics()
    console.print(f"workers replaced: {numbers['worker_restarts']:.0f}; padding {numbers['padding']:.1%}")
    return loader.state_dict(), seen


def _finish_with_other_ranks(
    shards: Path, processor: Any, state: dict[str, Any], seen: list[str], num_samples: int, console: Console
) -> bool:
    from vlm_stream import StreamLoader

    console.rule(f"5. go on with {_NEXT_WORLD} ranks instead of 1")
    begin = time.perf_counter()
    first = None
    for rank in range(_NEXT_WORLD):
        loader = StreamLoader(
            shards, processor=processor, pack_size=_PACK_SIZE, with_refs=True, rank=rank, world_size=_NEXT_WORLD
        )
        loader.load_state_dict(state)
        for batch in loader:
            first = first or time.perf_counter() - begin
            seen += [name[2] for row in batch["refs"] for name in row]
    good = len(seen) == len(set(seen)) == num_samples
    verdict = "each exactly once" if good else "NOT each exactly once: this is a defect"
    console.print(
        f"the state is {len(json.dumps(state))} bytes of JSON; the first batch came after {first or 0:.1f} s; "
        f"{len(seen)} of {num_samples} samples were delivered over the epoch, {verdict}."
    )
    return good


def _draw_plan(path: Path, lengths: Sequence[int], packs: Sequence[Sequence[tuple[int, int]]], capacity: int) -> None:
    """Draw the histogram of lengths above the layout of packs.

    Args:
        path: Where the PNG goes.
        lengths: Tokens of each sample.
        packs: For each row its samples, as (tokens, how many of them stand for images and videos).
        capacity: Tokens of a row.
    """
    from PIL import Image, ImageDraw

    image = Image.new("RGB", _SIZE, "white")
    canvas = ImageDraw.Draw(image)
    _histogram(canvas, (60, 40, 960, 230), lengths)
    canvas.text((60, 18), f"tokens per sample ({len(lengths)} samples)", fill=_INK)
    canvas.text((60, 268), f"the first packs of {capacity} tokens: a bar is a sample", fill=_INK)
    _legend(canvas, 560, 268, {name: _KINDS[name] for name in ("image and video", "text", "padding")})
    shown = packs[:_MAX_PACKS]
    height = 300 // max(len(shown), 1)
    for number, pack in enumerate(shown):
        top = 300 + number * height
        _pack(canvas, (60, top, 960, top + height - 4), pack, capacity)
    image.save(path)


def _draw_pack(path: Path, runs: Sequence[tuple[str, int]], capacity: int) -> None:
    """Draw what stands in one pack: kinds and lengths of its tokens, line by line."""
    from PIL import Image, ImageDraw

    lines, left, right, tall = 8, 20, 980, 26
    image = Image.new("RGB", (1000, 60 + lines * (tall + 6)), "white")
    canvas = ImageDraw.Draw(image)
    canvas.text((left, 14), f"a pack of {capacity} tokens, as the model reads it, line by line", fill=_INK)
    _legend(canvas, 460, 14, _KINDS)
    kinds = [kind for kind, length in runs for _ in range(length)]
    wide = -(-capacity // lines)
    for number in range(capacity):
        line, column = divmod(number, wide)
        begin, end = (left + (right - left) * place / wide for place in (column, column + 1))
        top = 44 + line * (tall + 6)
        colour = _KINDS[_NAMES[kinds[number]]] if number < len(kinds) else _EMPTY
        canvas.rectangle((begin, top, end, top + tall), fill=colour)
    image.save(path)


def _histogram(canvas: Any, box: tuple[int, int, int, int], lengths: Sequence[int]) -> None:
    import numpy as np

    left, top, right, bottom = box
    counts, edges = np.histogram(lengths, bins=40)
    width = (right - left) / len(counts)
    for number, count in enumerate(counts.tolist()):
        height = count / max(int(counts.max()), 1) * (bottom - top)
        if count:
            canvas.rectangle(
                (left + number * width, bottom - height, left + (number + 1) * width - 1, bottom), fill=_TEXT
            )
    canvas.line((left, bottom, right, bottom), fill=_INK)
    canvas.text((left, bottom + 4), f"{edges[0]:.0f}", fill=_INK)
    canvas.text((right - 30, bottom + 4), f"{edges[-1]:.0f}", fill=_INK)


def _pack(canvas: Any, box: tuple[float, float, float, float], pack: Sequence[tuple[int, int]], capacity: int) -> None:
    left, top, right, bottom = box
    canvas.rectangle(box, fill=_EMPTY)
    scale = (right - left) / capacity
    for tokens, vision in pack:
        middle, end = left + vision * scale, left + tokens * scale
        canvas.rectangle((left, top, max(middle, left), bottom), fill=_VISION)
        canvas.rectangle((middle, top, max(end - 1, middle), bottom), fill=_TEXT)
        left = end


def _legend(canvas: Any, left: int, top: int, names: dict[str, tuple[int, int, int]]) -> None:
    for name, colour in names.items():
        canvas.rectangle((left, top, left + 12, top + 12), fill=colour)
        canvas.text((left + 18, top), name, fill=_INK)
        left += 130


def _since(begin: float) -> str:
    return f"{time.perf_counter() - begin:.1f} s"


if __name__ == "__main__":
    sys.exit(main())
