"""Table: family -> samples whose counted length equals the length of the real processor's input_ids.

    python -m benchmarks.estimates [--samples 200] [--families qwen2_5_vl,gemma3] [--max-side 420]

Samples mix text only, one and several media, images of odd sizes, clips of odd lengths and rates, sounds, system turns
and texts that tokenise awkwardly. Frames are sampled by the package's rule and handed over with their metadata.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from rich.console import Console
from rich.table import Table

from tests.toy_samples import MEDIA_OF_FAMILY, encode_toy_sample, make_toy_sample
from vlm_stream.testing import FAMILIES, build_processor
from vlm_stream.tokens import TextCounter, count_tokens, make_columns


def measure(family: str, num_samples: int, max_side: int) -> list[str]:
    """Return one row of the table."""
    processor = build_processor(family)
    counter = TextCounter(processor)
    rng = np.random.default_rng(2026)
    equal = images = videos = audios = several = text_only = 0
    worst = 0
    encode_seconds = count_seconds = 0.0
    for _ in range(num_samples):
        sample = make_toy_sample(rng, MEDIA_OF_FAMILY[family], max_side=max_side)
        begin = time.perf_counter()
        actual = encode_toy_sample(processor, sample, counter.geometry.frames)["input_ids"].shape[1]
        middle = time.perf_counter()
        columns = make_columns([sample.sizes], [counter.count(sample.conversation, sample.sizes)])
        counted = int(count_tokens(columns, counter.geometry).tokens[0])
        encode_seconds += middle - begin
        count_seconds += time.perf_counter() - middle
        equal += counted == actual
        worst = max(worst, abs(counted - actual))
        numbers = [len(media) for media in (sample.sizes.images, sample.sizes.videos, sample.sizes.audios)]
        images, videos, audios = images + numbers[0], videos + numbers[1], audios + numbers[2]
        several += sum(numbers) > 1
        text_only += sum(numbers) == 0
    ratio = f"{encode_seconds / count_seconds:.0f}x"
    cells = [f"{equal} of {num_samples}", worst, text_only, several, images, videos, audios, ratio]
    return [family, *map(str, cells)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--max-side", type=int, default=420)
    options = parser.parse_args()
    table = Table(title="counted length == len(input_ids)")
    names = (
        "family",
        "equal",
        "worst",
        "text only",
        "several media",
        "images",
        "videos",
        "audios",
        "encode/count time",
    )
    for name in names:
        table.add_column(name, justify="left" if name == "family" else "right")
    for family in options.families.split(","):
        table.add_row(*measure(family, options.samples, options.max_side))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
