"""A meta file as a list in memory, one rank's share of it if asked: for datasets that fit, and for old recipes.

Enters: a meta file (or a bare data file), a rank. Leaves: a list of `{"conversation": ...}` with sums in `.stats` and
what was bad in `.ledger`. Only the records of this rank are parsed.

One rule deals records to ranks, for every format and ratio: after `sample_ratio`, record i of the whole meta file goes
to rank i mod world size. Shares are disjoint, together they are everything, and they differ by one record at most. They
are not cut to equal length: that would lose records of every dataset, and bad records make lengths differ anyway.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from vlm_stream.conversation import given_tokens, iter_media
from vlm_stream.errors import BadSampleError, ConfigError
from vlm_stream.ledger import BadSample, Ledger
from vlm_stream.sources.catalog import Catalog, FileCache, rank_share
from vlm_stream.sources.open_source import open_entry, read_entries
from vlm_stream.sources.sharegpt import MISMATCHES_KEY, OnMismatch, check_policy
from vlm_stream.tokens import guess_text_tokens

_LOG = logging.getLogger(__name__)
_SHOWN_BAD = 3
_TOKENS_PER_MEDIUM: Final = 500
"""NeMo Automodel's own guess, where nothing is known of a medium."""
SUMMED_KEYS: Final = ("n_images", "n_videos", "n_text_only", "n_text_tokens", "n_media_tokens")
_KEYS: Final = (*SUMMED_KEYS, "n_missing_text_tokens", "n_missing_mm_inputs_meta")


class ExamplesWithStats(list[dict[str, Any]]):
    """Examples with the sums over all of them, so that they need not be scanned again."""

    __slots__ = ("ledger", "stats")

    def __init__(self, examples: Iterable[dict[str, Any]] = ()) -> None:
        super().__init__(examples)
        self.stats: dict[str, int] = dict.fromkeys(SUMMED_KEYS, 0)
        self.ledger = Ledger()


@dataclass(frozen=True, slots=True)
class MetaDatasetConfig:
    """What `make_meta_dataset` needs, without the rank."""

    builds_with_data_parallel_rank: ClassVar[bool] = True
    """Loaders hand `build` their rank and world size."""

    path_or_dataset: str = ""
    """Path or URL of the meta file."""
    dataset_names: Sequence[str] | None = None
    """Which entries; all if None."""
    split: str = "train"
    """Has no meaning for meta files; kept so that recipes need not change."""
    shard_data: bool = False
    """Whether every rank loads its own share."""
    on_mismatch: OnMismatch = "drop"
    """What happens to a record that does not map whole."""

    def __post_init__(self) -> None:
        if not self.path_or_dataset:
            raise ConfigError("path_or_dataset is empty, so there is no data; give the path of a meta file.")
        check_policy(self.on_mismatch)

    def build(self, rank: int | None = None, world_size: int | None = None) -> ExamplesWithStats:
        """Load the datasets; with `shard_data` only the share of a rank, by default of this process."""
        return make_meta_dataset(
            self.path_or_dataset,
            self.dataset_names,
            self.split,
            self.shard_data,
            rank,
            world_size,
            on_mismatch=self.on_mismatch,
        )


def make_meta_dataset(
    path_or_dataset: str,
    dataset_names: Sequence[str] | None = None,
    split: str = "train",  # noqa: ARG001
    shard_data: bool = False,
    rank: int | None = None,
    world_size: int | None = None,
    *,
    on_mismatch: OnMismatch = "drop",
    **kwargs: Any,
) -> ExamplesWithStats:
    """Load the datasets of a meta file into one list, in sorted order of their names.

    Args:
        path_or_dataset: Path or URL of the meta file, or of a bare data file.
        dataset_names: Which entries; all if None.
        split: Has no meaning here.
        shard_data: Load only this rank's share. False never shards, whatever rank and world size say.
        rank: Which share; that of the process group if None.
        world_size: How many shares; that of the process group if None.
        on_mismatch: What happens to a record that does not map whole: `drop`, `keep` what maps, `raise`.
        **kwargs: Options of other factories; they mean nothing here and are named in the log.
    """
    if kwargs:
        _LOG.warning("make_meta_dataset has no use for %s", ", ".join(sorted(kwargs)))
    check_policy(on_mismatch)
    share = _share(rank, world_size) if shard_data else None
    began = time.perf_counter()
    result = ExamplesWithStats()
    files = FileCache()
    num_dealt = 0
    for entry in read_entries(str(path_or_dataset), files, names=dataset_names):
        start = time.perf_counter()
        catalog = open_entry(entry, files, on_mismatch)
        num_records = len(catalog)
        if share:
            catalog.order = rank_share(catalog.order, num_records, *share, begin=num_dealt)
        num_dealt += num_records
        located = time.perf_counter()
        examples = _read_all(catalog, result.ledger)
        stats = collect_sample_stats(examples)
        num_bad = len(catalog) - len(examples)
        counts = ", ".join(f"{stats[key]} {key.removeprefix('n_')}" for key in SUMMED_KEYS[:3])
        seconds = located - start, time.perf_counter() - located
        _LOG.info("dataset '%s': %d samples (%s), %d bad; located in %.2f s, converted in %.2f s",
                  entry.name, len(examples), counts, num_bad, *seconds)  # fmt: skip
        _warn(entry.name, examples, stats, num_bad)
        for key in SUMMED_KEYS:
            result.stats[key] += stats[key]
        result.extend(examples)
    whose = "of all ranks" if share is None else f"of rank {share[0]}"
    _LOG.info("%d samples %s in %.1f s", len(result), whose, time.perf_counter() - began)
    return result


def _share(rank: int | None, world_size: int | None) -> tuple[int, int] | None:
    """Return rank and world size, asked of the process group where they were not given; None: everything."""
    if rank is None or world_size is None:
        torch = sys.modules.get("torch")  # without it there is no process group to ask
        group = torch.distributed if torch is not None else None
        if group is None or not group.is_available() or not group.is_initialized():
            _LOG.warning(
                "shard_data is on, but rank or world_size is missing and there is no process group to ask: every "
                "process loads everything. Pass both, or start the process group first."
            )
            return None
        rank = group.get_rank() if rank is None else rank
        world_size = group.get_world_size() if world_size is None else world_size
    if world_size < 1 or not 0 <= rank < world_size:
        raise ConfigError(
            f"rank {rank} of world size {world_size} does not exist, so its share would be empty or another's; "
            "ranks count from 0 to world size - 1."
        )
    return (rank, world_size) if world_size > 1 else None


def _read_all(catalog: Catalog, ledger: Ledger) -> list[dict[str, Any]]:
    examples = []
    for index in range(len(catalog)):
        ledger.saw()
        try:
            record = catalog.read(index)
        except BadSampleError as error:
            where = catalog.origin(index)
            bad = BadSample(
                source=catalog.name, sample=where, stage=error.stage, reason=error.reason, detail=str(error)
            )
            if ledger.num_bad < _SHOWN_BAD:
                _LOG.warning("%s", error)
            ledger.add(bad)
            continue
        examples.append({"conversation": record.conversation, **record.extras})
    return examples


def _warn(name: str, examples: Sequence[Mapping[str, Any]], stats: Mapping[str, int], num_bad: int) -> None:
    """Say once per dataset what makes its numbers less than exact, and what is left out."""
    num = len(examples)
    notes = [example[MISMATCHES_KEY] for example in examples if MISMATCHES_KEY in example]
    reasons = Counter(note.partition(":")[0] for kept in notes for note in kept)
    counts = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
    for count, sentence in (
        (stats["n_missing_text_tokens"], f"of {num} samples have no _text_tokens; their text is estimated at a token "
         "per 3 characters."),
        (stats["n_missing_mm_inputs_meta"], f"of {num} samples have media without mm_inputs_meta; each medium is "
         "estimated at 500 tokens."),
        (num_bad, "samples are bad and left out; their reasons are in the ledger of the result."),
        (len(notes), f"samples are kept without what does not map ({counts})."),
    ):  # fmt: skip
        if count:
            _LOG.warning("dataset '%s': %d %s", name, count, sentence)


def collect_sample_stats(examples: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return media counts, token estimates, and how many examples lack the exact counts."""
    stats = dict.fromkeys(_KEYS, 0)
    for example in examples:
        media = list(iter_media(example["conversation"]))
        stats["n_images"] += sum(item["type"] == "image" for item in media)
        stats["n_videos"] += sum(item["type"] == "video" for item in media)
        stats["n_text_only"] += not media
        text_tokens = given_tokens(example.get("_text_tokens"))
        if text_tokens is None:
            stats["n_missing_text_tokens"] += 1
            text_tokens = guess_text_tokens(example["conversation"]) - len(media)
        stats["n_text_tokens"] += text_tokens
        meta = example.get("mm_inputs_meta")
        if (media_tokens := given_tokens(example.get("_media_tokens"))) is not None:
            stats["n_media_tokens"] += media_tokens
        elif isinstance(meta, dict):
            stats["n_media_tokens"] += _meta_tokens(meta)
        elif media:
            stats["n_missing_mm_inputs_meta"] += 1
            stats["n_media_tokens"] += _TOKENS_PER_MEDIUM * len(media)
    return stats


def _meta_tokens(meta: Mapping[str, Any]) -> int:
    num_tokens = 0
    for entry in (*(meta.get("images_meta") or ()), *(meta.get("videos_meta") or ())):
        if isinstance(entry, dict) and isinstance(entry.get("n_tokens"), int):
            num_tokens += entry["n_tokens"]
        elif entry is not None:
            num_tokens += _TOKENS_PER_MEDIUM
    return num_tokens
