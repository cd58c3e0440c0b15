"""What a list of examples holds: counts of media and estimates of tokens, and the table that shows them in a log."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from vlm_stream.conversation import iter_media

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["SUMMED_KEYS", "SourceTiming", "collect_sample_stats", "format_summary"]

CHARS_PER_TOKEN: Final = 3
TOKENS_PER_MEDIUM: Final = 500
"""What a medium counts while nothing is known of its size."""

SUMMED_KEYS: Final = ("n_images", "n_videos", "n_text_only", "n_text_tokens", "n_media_tokens")
_KEYS: Final = (*SUMMED_KEYS, "n_missing_text_tokens", "n_missing_mm_inputs_meta")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTiming:
    """One line of the summary."""

    name: str
    num_samples: int
    num_bad: int
    stats: Mapping[str, int]
    locate_seconds: float
    """Finding the records in their file."""
    convert_seconds: float
    """Reading, parsing and mapping them."""

    @property
    def total_seconds(self) -> float:
        """Return both together."""
        return self.locate_seconds + self.convert_seconds


def collect_sample_stats(examples: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return media counts, token estimates, and how many examples lack the exact counts."""
    stats = dict.fromkeys(_KEYS, 0)
    for example in examples:
        media = list(iter_media(example["conversation"]))
        stats["n_images"] += sum(item["type"] == "image" for item in media)
        stats["n_videos"] += sum(item["type"] == "video" for item in media)
        stats["n_text_only"] += not media
        text_tokens = example.get("_text_tokens")
        if not isinstance(text_tokens, int):
            stats["n_missing_text_tokens"] += 1
            text_tokens = _num_chars(example["conversation"]) // CHARS_PER_TOKEN
        stats["n_text_tokens"] += text_tokens
        meta = example.get("mm_inputs_meta")
        if isinstance(meta, dict):
            stats["n_media_tokens"] += _meta_tokens(meta)
        elif media:
            stats["n_missing_mm_inputs_meta"] += 1
            stats["n_media_tokens"] += TOKENS_PER_MEDIUM * len(media)
    return stats


def _num_chars(conversation: Sequence[Mapping[str, Any]]) -> int:
    num_chars = 0
    for message in conversation:
        content = message["content"]
        if isinstance(content, str):
            num_chars += len(content)
        else:
            num_chars += sum(len(item["text"]) for item in content if item.get("type") == "text")
    return num_chars


def _meta_tokens(meta: Mapping[str, Any]) -> int:
    num_tokens = 0
    for entry in (*(meta.get("images_meta") or ()), *(meta.get("videos_meta") or ())):
        if isinstance(entry, dict) and isinstance(entry.get("n_tokens"), int):
            num_tokens += entry["n_tokens"]
        elif entry is not None:
            num_tokens += TOKENS_PER_MEDIUM
    return num_tokens


def format_summary(timings: Sequence[SourceTiming], wall_seconds: float, rank: int | None = None) -> str:
    """Return the table of all sources, slowest first, as plain text."""
    from rich.console import Console
    from rich.table import Table

    title = f"{sum(t.num_samples for t in timings):,} samples in {wall_seconds:.1f} s"
    table = Table(title=title if rank is None else f"rank {rank}: {title}")
    table.add_column("dataset")
    for heading in ("locate s", "convert s", "total s", "samples", "images", "videos", "text only", "bad"):
        table.add_column(heading, justify="right")
    for timing in sorted(timings, key=lambda t: -t.total_seconds):
        counts = (timing.num_samples, *(timing.stats[key] for key in SUMMED_KEYS[:3]), timing.num_bad)
        seconds = (timing.locate_seconds, timing.convert_seconds, timing.total_seconds)
        table.add_row(timing.name, *(f"{s:.2f}" for s in seconds), *(f"{n:,}" for n in counts))
    out = io.StringIO()
    Console(file=out, width=120, color_system=None, force_terminal=False, force_jupyter=False).print(table)
    return out.getvalue().rstrip()
