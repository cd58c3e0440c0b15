"""Datasets of Megatron-Energon, used where they are: which tars a split has, what its samples are, what a blend mixes.

Enters: the URL of a folder with `.nv-meta/`, or of a metadataset's YAML; `#val` behind it names the split (`train` by
default), `;dataset_config=FILE` and `;split_config=FILE` behind that other files of `.nv-meta/`. Leaves: names of tars
with a field map, or a list of such datasets with weights. Code that a dataset brings along is never run: a dataset
that needs it is refused.
"""

from __future__ import annotations

import json
import posixpath
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, unquote

from vlm_stream.errors import ConfigError, DatasetError, NotFoundError, nearest_name
from vlm_stream.format import DEFAULT_PROMPTS, SAMPLE_FIELDS, FieldMap
from vlm_stream.storage import join_url, open_store, scheme_of, split_url

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vlm_stream.recipe import SourceOptions
    from vlm_stream.storage import Store, StoreOptions

__all__ = ["EnergonPart", "is_energon", "is_metadataset", "open_blends", "read_energon", "split_fragment"]

_META: Final = ".nv-meta"
_INFO: Final = (f"{_META}/.info.json", f"{_META}/.info.yaml")
_CRUDE: Final = ("CrudeWebdataset", "CrudeSample")
_MAX_DEPTH: Final = 16


@dataclass(frozen=True, slots=True)
class EnergonPart:
    """One split of an Energon dataset."""

    names: tuple[str, ...]
    """Its tars, relative to the dataset's folder."""
    excluded: frozenset[str]
    """Samples that are left out, as `TAR/KEY`."""
    fields: FieldMap | None
    """How samples become conversations; None: crude samples, whose layout is guessed as that of any tar."""
    subflavors: dict[str, Any]


def split_fragment(url: str) -> tuple[str, str, dict[str, str]]:
    """Return the URL before `#`, the split behind it, and the settings behind that.

    >>> split_fragment("coco/#val;split_config=small.yaml")
    ('coco', 'val', {'split_config': 'small.yaml'})
    """
    base, _, fragment = url.partition("#")
    split, *settings = fragment.split(";")
    pairs = [setting.partition("=") for setting in settings]
    for name, _, value in pairs:
        if name not in ("dataset_config", "split_config", "subflavors") or not value:
            raise ConfigError(
                f"'{url}' has '{name}' behind its split, which says nothing; write for example "
                f"#val;split_config=FILE or #val;dataset_config=FILE"
            )
    return base.rstrip("/") or base, split, {name: unquote(value) for name, _, value in pairs}


def is_energon(store: Store) -> bool:
    """Tell whether a folder is a dataset that `energon prepare` has written its notes into."""
    return any(_get(store, name) is not None for name in _INFO)


def read_energon(store: Store, split: str, settings: Mapping[str, str], *, as_bytes: bool = False) -> EnergonPart:
    """Return what a split of an Energon dataset is.

    Args:
        store: The dataset's folder.
        split: Its name; empty: `train`.
        settings: Other files of `.nv-meta/`, and subflavors from outside as JSON.
        as_bytes: Samples are to be handed out as they lie, so their type does not matter.

    Raises:
        ConfigError: There is no such split, or samples are read by code, or are of a type that is not known.
        DatasetError: A file of `.nv-meta/` cannot be read.
    """
    splits_file = settings.get("split_config", "split.yaml")
    splits = _read_yaml(store, f"{_META}/{splits_file}", f"{_META}/split.json")
    parts = splits.get("split_parts") or {}
    split = split or "train"
    if not parts.get(split):
        raise ConfigError(
            f"the Energon dataset at {store.root} has no tars in the split '{split}', so there is nothing to stream; "
            f"its splits are {', '.join(name for name, tars in parts.items() if tars) or 'empty'}: name one as "
            f"{store.root}#{next((name for name, tars in parts.items() if tars), 'train')}"
        )
    excluded = set(_expand(splits.get("exclude") or ()))
    names = tuple(name for name in _expand(parts[split]) if name not in excluded)
    config = _read_yaml(store, f"{_META}/{settings.get('dataset_config', 'dataset.yaml')}", missing_ok=True)
    subflavors = dict(config.get("subflavors") or {})
    if config.get("subflavor") is not None:
        subflavors.setdefault("__subflavor__", config["subflavor"])
    subflavors |= json.loads(settings.get("subflavors", "{}"))
    fields = None if as_bytes else _read_fields(store.root, config)
    return EnergonPart(names, frozenset(name for name in excluded if not name.endswith(".tar")), fields, subflavors)


def _read_fields(root: str, config: dict[str, Any]) -> FieldMap | None:
    given = config.get("sample_type")
    name = given.get("__class__", "") if isinstance(given, dict) else config.get("__class__", "")
    if not name or name in _CRUDE:
        return None
    sample_type = str(name).replace("Webdataset", "Sample")
    if sample_type not in SAMPLE_FIELDS:
        raise ConfigError(
            f"the Energon dataset at {root} has samples of the type '{name}', for which no conversation is known; "
            f"known are {', '.join(SAMPLE_FIELDS)}, CrudeWebdataset. Its tars can be named themselves: {root}/NAME.tar"
        )
    field_map = config.get("field_map")
    if config.get("sample_loader") is not None or not isinstance(field_map, dict):
        raise ConfigError(
            f"the Energon dataset at {root} reads its samples by code ({config.get('sample_loader') or 'no field_map'})"
            f", which is not run here, so its samples are unknown; write a field_map into {_META}/dataset.yaml (or "
            f"another file, and name that: {root}#train;dataset_config=FILE), or name its tars themselves"
        )
    lacking = [field for field in SAMPLE_FIELDS[sample_type] if field not in field_map]
    if lacking:
        raise ConfigError(
            f"the field_map of the Energon dataset at {root} does not say where {', '.join(lacking)} of {sample_type} "
            f"comes from, so no conversation can be made; add it to {_META}/dataset.yaml"
        )
    return FieldMap(
        layout="energon",
        columns={str(field): str(where) for field, where in field_map.items()},
        tags={"sample_type": sample_type},
        prompt=DEFAULT_PROMPTS.get(sample_type, FieldMap().prompt),
    )


def is_metadataset(url: str) -> bool:
    """Tell whether a source is the YAML file of a blend."""
    return split_fragment(url)[0].endswith((".yaml", ".yml")) if ".y" in url else False


def open_blends(sources: Sequence[SourceOptions], options: StoreOptions | None) -> tuple[SourceOptions, ...]:
    """Return the sources with every metadataset replaced by what it blends.

    `blend` gives weights, `blend_epochized` repetitions (`sample_ratio`).

    Raises:
        ConfigError: A metadataset holds what cannot be mixed here: `join`, `subset`, `aux`.
    """
    found: list[SourceOptions] = []
    for source in sources:
        if not is_metadataset(source.url):
            found.append(source)
            continue
        base, split, settings = split_fragment(source.url)
        leaves = _read_blend(base, split or "train", json.loads(settings.get("subflavors", "{}")), options)
        found += _to_sources(source, leaves)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Leaf:
    """One dataset of a blend."""

    path: str
    """As it is written."""
    url: str
    weight: float | None = None
    repetitions: float | None = None


def _to_sources(source: SourceOptions, leaves: Sequence[_Leaf]) -> list[SourceOptions]:
    if len(leaves) == 1:
        repetitions = leaves[0].repetitions or 1.0
        return [replace(source, url=leaves[0].url, sample_ratio=source.sample_ratio * repetitions)]
    if source.has_weight and any(leaf.weight is None for leaf in leaves):
        raise ConfigError(
            f"source '{source.name}' has a weight, and {source.url} gives its datasets repetitions instead of weights, "
            f"so their shares are not known; leave the weight out, or write 'blend' with weights into the file"
        )
    named: dict[str, int] = {}
    found = []
    for leaf in leaves:
        path = leaf.path.removeprefix("./").rstrip("/")
        named[path] = named.get(path, 0) + 1
        name = f"{source.name}/{path}" + (f"-{named[path]}" if named[path] > 1 else "")
        changes: dict[str, Any] = {"sample_ratio": source.sample_ratio * (leaf.repetitions or 1.0)}
        if leaf.weight is not None:
            changes = {"weight": source.weight * leaf.weight, "has_weight": True}
        found.append(replace(source, name=name, url=leaf.url, **changes))
    return found


def _read_blend(
    url: str, split: str, subflavors: dict[str, Any], options: StoreOptions | None, depth: int = 0
) -> list[_Leaf]:
    """Return the datasets of a metadataset's split."""
    if depth > _MAX_DEPTH:
        raise ConfigError(f"{url} is nested {depth} metadatasets deep: one of them holds itself, so it has no end.")
    root, name = split_url(url)
    data = _read_yaml(open_store(root, options), name)
    splits = data.get("splits")
    if not str(data.get("__class__", "Metadataset")).startswith("Metadataset") or not isinstance(splits, dict):
        raise ConfigError(
            f"{url} is no metadataset of Energon (it has no 'splits'), so there is nothing to blend; a recipe of this "
            f"package is read by StreamLoader.from_config or --config"
        )
    if split not in splits:
        raise ConfigError(f"the metadataset {url} has no split '{split}'; {nearest_name(split, splits)}")
    return _read_node(url, splits[split], split, subflavors, options, depth)


def _read_node(
    url: str, node: Any, split: str, subflavors: dict[str, Any], options: StoreOptions | None, depth: int
) -> list[_Leaf]:
    """Return the datasets below one node of a metadataset."""
    if not isinstance(node, dict):
        raise ConfigError(f"the metadataset {url} has {type(node).__name__} where a dataset or a blend belongs.")
    for key, instead in (
        ("join", "convert the joined samples with vlm-stream make-shards"),
        ("subset", "list the tars themselves: DIR/{000..063}.tar"),
        ("aux", "put the media into the tars"),
    ):
        if node.get(key) is not None:
            raise ConfigError(
                f"the metadataset {url} has '{key}', which only Energon itself can follow, so it cannot be used as it "
                f"is; {instead}, and blend those"
            )
    subflavors = dict(node.get("subflavors") or {}) | subflavors
    for key, number in (("blend", "weight"), ("datasets", "weight"), ("blend_epochized", "repetitions")):
        entries = node.get(key)
        if entries is not None:
            return _mix(url, entries, number, split, subflavors, options, depth)
    if not isinstance(node.get("path"), str):
        raise ConfigError(f"the metadataset {url} has an entry without path, blend or blend_epochized: {node!r:.120}")
    return _read_path(url, node, node.get("split_part") or split, subflavors, options, depth)


def _mix(
    url: str,
    entries: Any,
    number: str,
    split: str,
    subflavors: dict[str, Any],
    options: StoreOptions | None,
    depth: int,
) -> list[_Leaf]:
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"the metadataset {url} has an empty blend, so there is nothing to stream.")
    factors = [entry.get(number, 1.0) if isinstance(entry, dict) else None for entry in entries]
    if not all(isinstance(factor, int | float) and factor >= 0 for factor in factors) or not any(factors):
        raise ConfigError(
            f"the metadataset {url} has a blend whose {number} are {factors!r:.120}, not numbers above 0."
        )
    total = sum(float(factor or 0) for factor in factors)
    found = []
    for entry, factor in zip(entries, factors, strict=True):
        if not factor:
            continue  # Energon never draws it either
        for leaf in _read_node(url, entry, split, subflavors, options, depth):
            if (leaf.repetitions if number == "weight" else leaf.weight) is not None:
                raise ConfigError(
                    f"the metadataset {url} has blend and blend_epochized inside one another, so there is no one "
                    f"meaning of its shares; use one of them throughout"
                )
            share = factor / total if number == "weight" else factor
            found.append(replace(leaf, **{number: share * (getattr(leaf, number) or 1.0)}))
    return found


def _read_path(
    url: str, node: dict[str, Any], split: str, subflavors: dict[str, Any], options: StoreOptions | None, depth: int
) -> list[_Leaf]:
    path = node["path"]
    if path.endswith(".jsonl"):
        raise ConfigError(
            f"the metadataset {url} blends {path}, whose records lie outside of tars, so it cannot be streamed as it "
            f"is; convert it with vlm-stream make-shards, and name the result"
        )
    place = _resolve(split_url(url)[0], path)
    if path.endswith((".yaml", ".yml")):
        return _read_blend(place, split, subflavors, options, depth + 1)
    settings = {key: str(node[key]) for key in ("split_config", "dataset_config") if node.get(key)}
    if subflavors:
        settings["subflavors"] = quote(json.dumps(subflavors, sort_keys=True))
    return [_Leaf(path, f"{place}#{';'.join([split, *(f'{key}={value}' for key, value in settings.items())])}")]


def _resolve(root: str, path: str) -> str:
    if scheme_of(path) != "file" or posixpath.isabs(path):
        return path
    joined = join_url(root, path)
    prefix, sign, rest = joined.rpartition("://")
    return prefix + sign + posixpath.normpath(rest)


def _expand(patterns: Sequence[str]) -> list[str]:
    from braceexpand import braceexpand

    return [name for pattern in patterns for name in braceexpand(str(pattern))]


def _get(store: Store, name: str) -> bytes | None:
    try:
        return store.get(name)
    except NotFoundError:
        return None


def _read_yaml(store: Store, *names: str, missing_ok: bool = False) -> dict[str, Any]:
    """Return what the first of these files holds that is there."""
    import yaml

    text = next((text for name in names if (text := _get(store, name)) is not None), None)
    if text is None:
        if missing_ok:
            return {}
        raise DatasetError(
            f"{store.url(names[0])} cannot be read, so the dataset is unknown; if it is Energon's, write it with: "
            f"energon prepare"
        )
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise DatasetError(f"{store.url(names[0])} is not YAML, so the dataset is unknown: {error}") from error
    if not isinstance(data, dict):
        raise DatasetError(f"{store.url(names[0])} holds {type(data).__name__}, not a mapping, so it says nothing.")
    return data
