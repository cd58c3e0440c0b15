"""Families that no rule is written for: their processor is asked once for each size, and its answers are kept.

    tokens of a medium = ids of a short chat with it - ids of that chat as the template writes it + 1
    text tokens        = ids of the sample - tokens of all its media + number of media

The second line makes lengths exact whatever a processor writes, and wherever: what depends on neighbours, on timestamps
or on where text merges counts as text. An answer is a function of the processor and the size alone, so ranks, resumes
and later runs agree; answers are kept in memory and, once `remember_in` names folders, in a file.
"""

import hashlib
import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from vlm_stream.errors import ConfigError
from vlm_stream.tokens.asker import Asker, Count, describe, first_line
from vlm_stream.tokens.chat import audio_rate, media_of
from vlm_stream.tokens.rules import Ints, MediaCounts, TakesAnySize
from vlm_stream.tokens.rules.audio import WindowedMel
from vlm_stream.tokens.rules.grids import FrameGrid, PatchGrid

_log = logging.getLogger(__name__)

_VERSION: Final = 1
_SIDE_BITS: Final = 20
_PROGRESS_S: Final = 10.0
_ARTICLES: Final = {"image": "an image", "video": "a video", "audio": "a sound"}
COMMON_RULES: Final[dict[str, Any]] = {"image": PatchGrid(), "video": FrameGrid(), "audio": WindowedMel()}
"""Of the most common families: for media of which nothing is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured(TakesAnySize):
    """What a processor answers; names what was asked, and the answers are looked up."""

    asked: str  # digest of everything that decides the answers: class, settings, tokenizer, version of transformers
    by_siblings: bool = False  # whether an image counts otherwise beside others
    sampling_rate: int = 16000  # what sound is resampled to

    def count_images(self, heights: Ints, widths: Ints, siblings: Ints) -> MediaCounts:
        number = siblings if self.by_siblings else np.ones_like(siblings)
        return _table(self.asked).count("image", heights, widths, number)

    def count_videos(self, frames: Ints, heights: Ints, widths: Ints) -> MediaCounts:
        return _table(self.asked).count("video", frames, heights, widths)

    def count_audios(self, samples: Ints, longest: Ints) -> MediaCounts:  # noqa: ARG002
        return _table(self.asked).count("audio", samples)

    def remember_in(self, folders: Iterable[Path]) -> None:
        """Read answers from files in these folders, and write new ones to the first that can be written to."""
        _table(self.asked).remember_in(folders)


class _Table:
    """The answers of one processor."""

    def __init__(self, asked: str) -> None:
        self.asker: Asker | None = None
        self.readable: dict[str, bool] = {}
        self.by_siblings = False
        self._asked = asked
        self._answers: dict[str, dict[tuple[int, ...], Count]] = {medium: {} for medium in _ARTICLES}
        self._files: list[Path] = []
        self._num_saved = 0
        self._lock = threading.Lock()
        self._has_warned = False

    def count(self, medium: str, *columns: Ints) -> MediaCounts:
        """Count m media by columns of their sizes, each [m]."""
        largest = (1 << _SIDE_BITS) - 1
        key = columns[0].astype(np.int64)
        for column in columns[1:]:
            key = (key << _SIDE_BITS) | np.clip(column, 0, largest)
        _, first, places = np.unique(key, return_index=True, return_inverse=True)
        sizes = [tuple(int(column[row]) for column in columns) for row in first.tolist()]
        with self._lock:
            found = np.asarray(self._look_up(medium, sizes), np.int64).reshape(-1, 3)[places]
        tokens, patches, piece = found.T
        counts = MediaCounts(tokens, patches, patches.astype(np.float64) * piece)
        return self._fill(medium, counts, columns) if np.any(tokens < 0) else counts

    def _look_up(self, medium: str, sizes: list[tuple[int, ...]]) -> list[Count]:
        known = self._answers[medium]
        missing = [size for size in sizes if size not in known]
        if missing and self.asker is None:
            raise ConfigError(
                f"{len(missing):,} sizes of {medium}s were never measured, and there is no processor to ask, so their "
                f"tokens are not known. Name the processor that trains (processor=, --processor)."
            )
        begin = said = time.monotonic()
        for number, size in enumerate(missing):
            known[size] = self._ask(medium, size)
            if time.monotonic() - said > _PROGRESS_S:
                said = time.monotonic()
                left = (said - begin) / (number + 1) * (len(missing) - number - 1)
                name = self.asker.name if self.asker else ""
                _log.warning("%s: %d of %d sizes measured, %.0f s left", name, number + 1, len(missing), left)
        if missing:
            self._save()
        return [known[size] for size in sizes]

    def _ask(self, medium: str, size: tuple[int, ...]) -> Count:
        assert self.asker is not None  # noqa: S101 - `_look_up` has seen to it
        try:
            return self.asker.count(medium, size)
        except MemoryError:  # not an answer: another rank may have the memory
            raise
        except Exception as error:  # processors raise nearly anything on sizes that they refuse
            if not self._has_warned:
                self._has_warned = True
                _log.warning(
                    "%s refuses %s of the size %s (%s), so such media are counted by a common rule and their samples "
                    "will be bad; crop or leave them out. Further ones are not reported.",
                    self.asker.name,
                    _ARTICLES[medium],
                    "x".join(map(str, size)),
                    first_line(error),
                )
            return Count(-1, 0, 0)

    def _fill(self, medium: str, counts: MediaCounts, columns: Sequence[Ints]) -> MediaCounts:
        sizes = (*columns, *columns) if medium == "audio" else columns  # each sound is the longest of its sample
        common: MediaCounts = getattr(COMMON_RULES[medium], f"count_{medium}s")(*sizes)
        is_refused = counts.tokens < 0
        return MediaCounts(
            np.where(is_refused, common.tokens, counts.tokens),
            np.where(is_refused, common.patches, counts.patches),
            np.where(is_refused, common.squares, counts.squares),
        )

    def remember_in(self, folders: Iterable[Path]) -> None:
        with self._lock:
            for file in (folder / f"measured-{self._asked}.json" for folder in folders):
                if file not in self._files:
                    self._files.append(file)
                    self._load(file)
            self._save()

    def _load(self, file: Path) -> None:
        with suppress(OSError, ValueError, TypeError, KeyError):  # torn, of another version, or not there
            kept = json.loads(file.read_bytes())
            if kept.pop("version") == _VERSION:
                for medium, rows in kept.items():
                    self._answers[medium] |= {tuple(row[:-3]): Count(*row[-3:]) for row in rows}
                self._num_saved = max(self._num_saved, sum(map(len, kept.values())))

    def _save(self) -> None:
        """Write all answers to the first folder that takes them, whenever they have grown by a tenth."""
        number = sum(map(len, self._answers.values()))
        if not number or number * 10 < self._num_saved * 11:
            return
        for file in self._files:
            self._load(file)  # what other ranks have written meanwhile
            rows = {m: [[*size, *count] for size, count in answers.items()] for m, answers in self._answers.items()}
            with suppress(OSError):
                file.parent.mkdir(parents=True, exist_ok=True)
                descriptor, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
                with os.fdopen(descriptor, "w") as part:
                    json.dump({"version": _VERSION, **rows}, part)
                Path(name).chmod(0o644)
                Path(name).replace(file)
                self._num_saved = sum(map(len, rows.values()))
                return


_tables: dict[str, _Table] = {}
_tables_lock = threading.Lock()


def _table(asked: str) -> _Table:
    with _tables_lock:
        return _tables.setdefault(asked, _Table(asked))


def ask(processor: Any) -> tuple[Asker | None, dict[str, Measured]]:
    """Return who asks the processor, and the rules of the media that it can be asked for."""
    try:
        settings = describe(processor)
    except Exception as error:
        _log.warning(
            "%s cannot be asked what media cost (%s), so they are counted by a common rule, and packs may come out too "
            "long; check its tokenizer.",
            type(processor).__name__,
            first_line(error),
        )
        return None, {}
    asked = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
    table = _table(asked)
    with _tables_lock:
        if table.asker is None:
            asker = Asker(processor)
            for medium in media_of(processor):
                table.readable[medium] = _can_be_asked(asker, medium)
            table.by_siblings = table.readable.get("image", False) and asker.depends_on_siblings()
            table.asker = asker
    rule = Measured(asked=asked, by_siblings=table.by_siblings, sampling_rate=audio_rate(processor))
    rules = {medium: rule for medium, is_readable in table.readable.items() if is_readable}
    return (table.asker if rules else None), rules


def _can_be_asked(asker: Asker, medium: str) -> bool:
    try:
        asker.prove(medium)
    except Exception as error:
        _log.warning(
            "%s cannot be asked what %s costs (%s), so %ss are counted by a common rule, and packs with them may "
            "come out too long; check that its chat template shows %ss, and that it runs on one.",
            asker.name,
            _ARTICLES[medium],
            first_line(error),
            medium,
            medium,
        )
        return False
    return True
