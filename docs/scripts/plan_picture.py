"""Draw docs/images/plan.svg: lengths of samples, the packs of one step, and what each rank has to do in it.

`python -m docs.scripts.plan_picture` writes it again from toy data; the same code gives the same picture.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from docs.scripts.links import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

PICTURE: Final = ROOT / "docs" / "images" / "plan.svg"
SAMPLES: Final = 400
PACK_SIZE: Final = 2048
WORLD: Final = 4
MICRO_BATCHES: Final = 2
_TEXT, _VISION, _EMPTY, _INK, _PALE = "#5a78be", "#eb963c", "#e4e4e4", "#2b2b2b", "#8a8a8a"


class Drawn(NamedTuple):
    """What the picture shows."""

    lengths: list[int]
    packs: list[list[list[tuple[int, int]]]]
    """[rank][micro] samples as (tokens, vision tokens)."""
    costs: dict[str, list[float]]
    """LLM and ViT: cost of each rank by the mean of all."""
    fill: float


def plan_step() -> Drawn:
    """Convert toy data, plan it, and take its second step apart."""
    from vlm_stream.convert import make_shards
    from vlm_stream.options import StreamOptions
    from vlm_stream.plan import plan_report
    from vlm_stream.planning import open_plan
    from vlm_stream.recipe import normalise_sources
    from vlm_stream.testing import build_processor, make_toy_dataset

    with tempfile.TemporaryDirectory() as folder:
        limits = {"size": {"shortest_edge": 4 * 28 * 28, "longest_edge": 256 * 28 * 28}}
        processor = build_processor("qwen2_5_vl", image=limits, video=limits | {"cap_pixels_per_frame": False})
        processor.save_pretrained(Path(folder) / "processor")
        meta = make_toy_dataset(Path(folder) / "toy", num_samples=SAMPLES)
        shards = Path(folder) / "shards"
        make_shards(meta, shards, processor=str(Path(folder) / "processor"), samples_per_shard=50, workers=1)
        options = StreamOptions(pack_size=PACK_SIZE, micro_batches=MICRO_BATCHES)
        planner = open_plan(normalise_sources(str(shards)), options).planner
        shape = options.shape(WORLD)
        columns = [
            planner.read_columns(0, [shard]).pick(np.arange(samples))
            for shard, samples in enumerate(planner.sources[0].samples_per_shard)
        ]
        step = list(planner.steps(shape))[1]
        packs = [
            [
                [
                    (int(columns[ref.shard].tokens[ref.row]), int(columns[ref.shard].vision_tokens[ref.row]))
                    for row in step.refs(rank, micro)
                    for ref in row
                ]
                for micro in range(MICRO_BATCHES)
            ]
            for rank in range(WORLD)
        ]
        numbers = step.numbers()
        costs = {}
        for name, column in (("LLM", step.table.llm), ("ViT", step.table.vit)):
            load = np.where(numbers >= 0, column[numbers], 0).sum(axis=(0, 2))
            costs[name] = (load / load.mean()).tolist()
        lengths = [int(count) for each in columns for count in each.tokens]
        return Drawn(lengths, packs, costs, plan_report(planner, shape).fill)


def draw(drawn: Drawn) -> str:
    """Return the picture."""
    body = [*_histogram(drawn.lengths), *_packs(drawn.packs), *_costs(drawn.costs), *_legend()]
    head = (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1000 430" font-family="sans-serif" font-size="13">\n'
        "<title>A plan: lengths of samples, the packs of one step, and the load of each rank</title>\n"
        '<rect width="1000" height="430" fill="white"/>\n'
    )
    return head + "\n".join(body) + "\n</svg>\n"


def _rect(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{height:.1f}" fill="{colour}"/>'


def _say(x: float, y: float, text: str, **attributes: Any) -> str:
    own = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{attributes.pop("colour", _INK)}"{own}>{text}</text>'


def _histogram(lengths: list[int]) -> Iterator[str]:
    left, top, width, height = 40, 45, 920, 90
    counts, edges = np.histogram(lengths, bins=46)
    yield _say(left, 28, f"Tokens of each sample ({len(lengths)} samples)", font_weight="bold")
    step = width / len(counts)
    for number, count in enumerate(counts.tolist()):
        tall = count / counts.max() * height
        yield _rect(left + number * step, top + height - tall, step - 1, tall, _TEXT)
    yield _rect(left, top + height, width, 1, _INK)
    yield _say(left, top + height + 16, f"{edges[0]:.0f}")
    yield _say(left + width, top + height + 16, f"{edges[-1]:.0f}", text_anchor="end")


def _packs(packs: list[list[list[tuple[int, int]]]]) -> Iterator[str]:
    left, top, width, tall = 100, 215, 560, 20
    title = f"One step: {len(packs)} ranks x {len(packs[0])} rows of {PACK_SIZE} tokens"
    yield _say(40, 195, title, font_weight="bold")
    scale = width / PACK_SIZE
    for rank, rows in enumerate(packs):
        yield _say(40, top + 28, f"rank {rank}")
        for row in rows:
            yield _rect(left, top, width, tall, _EMPTY)
            begin = float(left)
            for tokens, vision in row:
                yield _rect(begin, top, vision * scale, tall, _VISION)
                yield _rect(begin + vision * scale, top, (tokens - vision) * scale - 1.5, tall, _TEXT)
                begin += tokens * scale
            top += tall + 3
        top += 4


def _costs(costs: dict[str, list[float]]) -> Iterator[str]:
    left, tall = 700, 20
    yield _say(left, 195, "Cost of a rank by the mean", font_weight="bold")
    for name, colour, shift in (("LLM", _TEXT, 0), ("ViT", _VISION, tall + 3)):
        top = 215 + shift
        for value in costs[name]:
            yield _rect(left, top, 180 * value, tall, colour)
            yield _say(left + 222, top + 15, f"{name} {value:.3f}")
            top += 2 * (tall + 3) + 4
    yield _rect(left + 180, 211, 1, 200, _INK)


def _legend() -> Iterator[str]:
    left = 420
    for colour, text, width in (
        (_VISION, "image and video tokens", 180),
        (_TEXT, "text tokens", 110),
        (_EMPTY, "padding", 80),
    ):
        yield _rect(left, 17, 12, 12, colour)
        yield _say(left + 18, 28, text)
        left += width


if __name__ == "__main__":
    PICTURE.write_text(draw(plan_step()), encoding="utf-8")
