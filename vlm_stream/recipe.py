"""What a user may write: a recipe as a YAML file, and `sources` in its several forms.

A recipe is a mapping of the arguments of `StreamLoader`; nothing else. Paths are relative to the working directory, as
on a command line. Nothing is opened here and the environment is not read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

from vlm_stream.errors import ConfigError, nearest_name

Sources: TypeAlias = str | os.PathLike[str] | Sequence[str | os.PathLike[str] | Mapping[str, Any]] | Mapping[str, Any]
"""A path or URL, or `{"url": ..., "weight": ..., "weights": {entry: ...}, "sample_ratio": ...}`; a list of either, or
`{name: either}`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """One dataset of a mixture."""

    name: str
    """Identifies the source in states, refs and the ledger; with the seed it decides the order of its samples."""
    url: str
    """A folder or URL with `dataset.json`; tars (`{00..31}.tar`, `a.tar::b.tar`); an Energon dataset (`dir#val`)."""
    weight: float = 1.0
    """Share of this source in the mixture, relative to the other weights."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Share of each entry of the meta file that the dataset was made of: each becomes a source of its own. They divide
    `weight` where that is given, else they count like weights of sources. 0 leaves an entry out."""
    sample_ratio: float = 1.0
    """How much of the source one of its epochs delivers; above 1 samples repeat."""
    has_weight: bool = False
    """Whether the user gave the weight: sources without any are delivered whole."""

    def __post_init__(self) -> None:
        for name in ("weight", "sample_ratio"):
            if not _is_number(value := getattr(self, name)) or not value:
                raise ConfigError(
                    f"source '{self.name}' has {name}={value!r}, but it must be a positive number; "
                    f"leave the source out to not use it"
                )
        if not isinstance(self.weights, Mapping):
            raise ConfigError(
                f"source '{self.name}' has weights={self.weights!r:.80}; give a number for each entry: {{captions: 2}}"
            )
        for entry, value in self.weights.items():
            if not _is_number(value):
                raise ConfigError(
                    f"source '{self.name}' has the weight {value!r} for '{entry}', but it must be a number of 0 or "
                    f"more; 0 leaves the entry out"
                )
        if self.weights and not any(self.weights.values()):
            raise ConfigError(
                f"source '{self.name}' has weights that are all 0, so nothing of it would be drawn; "
                f"leave the source out to not use it"
            )

    def of_entry(self, entry: str) -> SourceOptions:
        """Return what is asked of one entry, as a source of its own."""
        share = self.weights[entry]
        weight = self.weight * share / sum(self.weights.values()) if self.has_weight else share
        return replace(self, name=f"{self.name}:{entry}", weight=weight, weights={}, has_weight=True)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")


_KEYS: Final = ("url", "weight", "weights", "sample_ratio")


def normalise_sources(sources: Sources) -> tuple[SourceOptions, ...]:
    """Return the sources in the order given, each with a name of its own (`data`, or `data-0`, `data-1` in a list)."""
    if isinstance(sources, str | os.PathLike) or (isinstance(sources, Mapping) and _is_one(sources)):
        sources = [sources]
    if isinstance(sources, Mapping):
        return tuple(_from_entry(name, entry) for name, entry in sources.items()) or _refuse_empty()
    if not isinstance(sources, Sequence):
        raise ConfigError(
            f"sources is a {type(sources).__name__}, so nothing can be opened; give a path or URL, a list of them, "
            f"or a mapping of names to {{url, weight, weights, sample_ratio}}"
        )
    # Not the folders' names: the order of samples follows the source's name, and a dataset may move.
    names = ["data"] if len(sources) == 1 else [f"data-{number}" for number in range(len(sources))]
    return tuple(map(_from_entry, names, sources)) or _refuse_empty()


def _is_one(sources: Mapping[str, Any]) -> bool:
    """Tell whether a mapping describes one source, not several by name."""
    return "url" in sources and set(sources) <= set(_KEYS)


def _from_entry(name: str, entry: Any) -> SourceOptions:
    if isinstance(entry, str | os.PathLike):
        return SourceOptions(name=name, url=os.fspath(entry).rstrip("/"))
    if not isinstance(entry, Mapping):
        raise ConfigError(
            f"source '{name}' is a {type(entry).__name__}; give its URL, or {{url, weight, weights, sample_ratio}}"
        )
    for key in entry:
        if key not in _KEYS:
            raise ConfigError(f"source '{name}' has an unknown key '{key}'; {nearest_name(str(key), _KEYS)}")
    if "url" not in entry:
        raise ConfigError(f"source '{name}' has no url, so there is nothing to open; add url: PATH_OR_URL")
    given = dict(entry) | {"url": os.fspath(entry["url"]).rstrip("/")}
    if isinstance(weights := given.get("weights"), Mapping):
        given["weights"] = {str(key): value for key, value in weights.items()}
    return SourceOptions(name=name, **given, has_weight="weight" in entry)


def _refuse_empty() -> tuple[SourceOptions, ...]:
    raise ConfigError("sources is empty, so there is nothing to stream; give at least one dataset path or URL")


def load_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    import yaml

    name = os.fspath(path)
    try:
        text = Path(name).read_text(encoding="utf-8")
        _refuse_repeated_keys(name, yaml.compose(text, yaml.SafeLoader))
        data = yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"the recipe {name} cannot be read ({error.strerror}); check the path") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"the recipe {name} is not YAML, so nothing of it can be used: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(
            f"the recipe {name} holds {type(data).__name__}, not a mapping; write the arguments of StreamLoader, one "
            f"'name: value' a line"
        )
    for key in ("sources", "processor"):
        if key not in data:
            raise ConfigError(f"the recipe {name} has no '{key}', so there is nothing to stream; add {key}: ...")
    return {str(key): value for key, value in data.items()}


def _refuse_repeated_keys(recipe: str, node: Any) -> None:
    """Refuse a name that stands twice in one mapping of the parsed text: YAML takes the last, without a word."""
    pairs = node.value if node is not None and node.id == "mapping" else ()
    first: dict[str, int] = {}
    for key, value in pairs:
        name, line = str(key.value), key.start_mark.line + 1
        if name in first:
            raise ConfigError(
                f"the recipe {recipe} has '{name}' twice, in lines {first[name]} and {line}, and only the last would "
                f"count; keep one of them"
            )
        first[name] = line
        _refuse_repeated_keys(recipe, value)
    for item in node.value if node is not None and node.id == "sequence" else ():
        _refuse_repeated_keys(recipe, item)
