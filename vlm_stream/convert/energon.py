"""Datasets of Megatron-Energon, used where they are: which tars a split has, what its samples are, what a blend mixes.

Enters: the URL of a folder with `.nv-meta/`, or of a metadataset's YAML; `#val` after it names the split (`train` by
default), `;dataset_config=FILE` and `;split_config=FILE` after that other files of `.nv-meta/`. Leaves: `Tars` with a
field map, or a list of such datasets with weights. Code that a dataset brings along is never run: a dataset
that needs it is refused.
"""

import json
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final
from urllib.parse import quote, unquote

from vlm_stream.convert.foreign import BYTES, Tars
from vlm_stream.errors import ConfigError, DatasetError, NotFoundError, nearest_name
from vlm_stream.format import DEFAULT_PROMPTS, SAMPLE_FIELDS, FieldMap
from vlm_stream.recipe import SourceOptions
from vlm_stream.storage import (
    Store,
    StoreOptions,
    expand_braces,
    host_of,
    is_under,
    join_url,
    names_tars,
    open_store,
    scheme_of,
    split_url,
)

_META: Final = ".nv-meta"
_INFO: Final = (f"{_META}/.info.json", f"{_META}/.info.yaml")
_CRUDE: Final = ("CrudeWebdataset", "CrudeSample")
_MAX_DEPTH: Final = 16
_MAX_FILES: Final = 1000
_MAX_NESTED: Final = 64
_MAX_VALUES: Final = 1 << 22
_MAX_NAMES: Final = 1 << 22
_MOST: Final = 1e12
"""Of a weight, or of repetitions."""


def split_fragment(url: str) -> tuple[str, str, dict[str, str]]:
    """Return the URL before `#`, the split after it, and the settings after that.

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


def read_energon(store: Store, split: str, settings: Mapping[str, str], *, as_bytes: bool = False) -> Tars:
    """Return the tars of a split of an Energon dataset (`train` by default).

    `settings` name other files of `.nv-meta/`, and subflavors from outside as JSON. Where samples are handed out as
    bytes their type does not matter.
    """
    splits_file = settings.get("split_config", "split.yaml")
    splits = _read_yaml(store, f"{_META}/{splits_file}", f"{_META}/split.json")
    parts = _mapping(splits.get("split_parts"), "split_parts", store.root)
    split = split or "train"
    if not parts.get(split):
        raise ConfigError(
            f"the Energon dataset at {store.root} has no tars in the split '{split}', so there is nothing to stream; "
            f"its splits are {', '.join(name for name, tars in parts.items() if tars) or 'empty'}: name one as "
            f"{store.root}#{next((name for name, tars in parts.items() if tars), 'train')}"
        )
    excluded = set(_expand(splits.get("exclude"), "exclude", store.root))
    names = tuple(name for name in _expand(parts[split], split, store.root) if name not in excluded)
    config = _read_yaml(store, f"{_META}/{settings.get('dataset_config', 'dataset.yaml')}", missing_ok=True)
    subflavors = _mapping(config.get("subflavors"), "subflavors", store.root)
    if config.get("subflavor") is not None:
        subflavors.setdefault("__subflavor__", config["subflavor"])
    subflavors = _as_json(subflavors | _given_subflavors(settings, store.root), store.root)
    return Tars(
        root=store.root,
        names=names,
        fields=BYTES if as_bytes else _read_fields(store.root, config),
        excluded=frozenset(name for name in excluded if not name.endswith(".tar")),
        subflavors=subflavors,
    )


def _read_fields(root: str, config: dict[str, Any]) -> FieldMap | None:
    """Return how samples become conversations; None: crude samples, whose layout is guessed as that of any tar."""
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
    """
    found: list[SourceOptions] = []
    for source in sources:
        if not is_metadataset(source.url):
            found.append(source)
            continue
        base, split, settings = split_fragment(source.url)
        blend = _Blend(base, split or "train", _given_subflavors(settings, source.url), options)
        found += _to_sources(source, blend.read())
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Leaf:
    """One dataset of a blend."""

    path: str  # as it is written
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


@dataclass(frozen=True, slots=True)
class _Blend:
    """A split of a metadataset; what is below it sees the subflavors and the split of what is above."""

    url: str
    split: str
    subflavors: dict[str, Any]
    options: StoreOptions | None
    depth: int = 0
    read_files: list[str] = field(default_factory=list)
    """Metadatasets that were read, of the whole tree."""

    def read(self) -> list[_Leaf]:
        url = self.url
        if self.depth > _MAX_DEPTH:
            raise ConfigError(
                f"{url} is nested {self.depth} metadatasets deep: one of them holds itself, so it has no end."
            )
        self.read_files.append(url)
        if len(self.read_files) > _MAX_FILES:
            raise ConfigError(
                f"{self.read_files[0]} blends more than {_MAX_FILES} metadatasets, or one of them again and again, so "
                f"it cannot be used; name its datasets themselves."
            )
        root, name = split_url(url)
        data = _read_yaml(open_store(root, self.options), name)
        splits = data.get("splits")
        if not str(data.get("__class__", "Metadataset")).startswith("Metadataset") or not isinstance(splits, dict):
            raise ConfigError(
                f"{url} is no metadataset of Energon (it has no 'splits'), so there is nothing to blend; a recipe of "
                f"this package is read by StreamLoader.from_config or --config"
            )
        if self.split not in splits:
            raise ConfigError(
                f"the metadataset {url} has no split '{self.split}'; {nearest_name(self.split, map(str, splits))}"
            )
        return self._node(splits[self.split])

    def _node(self, node: Any) -> list[_Leaf]:
        url = self.url
        if not isinstance(node, dict):
            raise ConfigError(f"the metadataset {url} has {type(node).__name__} where a dataset or a blend belongs.")
        for key, instead in (
            ("join", "convert the joined samples with vlm-stream make-shards"),
            ("subset", "list the tars themselves: DIR/{000..063}.tar"),
            ("aux", "put the media into the tars"),
        ):
            if node.get(key) is not None:
                raise ConfigError(
                    f"the metadataset {url} has '{key}', which only Energon itself can follow, so it cannot be used as "
                    f"it is; {instead}, and blend those"
                )
        below = replace(self, subflavors=_mapping(node.get("subflavors"), "subflavors", url) | self.subflavors)
        for key, number in (("blend", "weight"), ("datasets", "weight"), ("blend_epochized", "repetitions")):
            if node.get(key) is not None:
                return below._mix(node[key], number)
        if not isinstance(node.get("path"), str):
            raise ConfigError(
                f"the metadataset {url} has an entry without path, blend or blend_epochized: {node!r:.120}"
            )
        return replace(below, split=str(node.get("split_part") or self.split))._path(node)

    def _mix(self, entries: Any, number: str) -> list[_Leaf]:
        url = self.url
        if not isinstance(entries, list) or not entries:
            raise ConfigError(f"the metadataset {url} has an empty blend, so there is nothing to stream.")
        factors = [entry.get(number, 1.0) if isinstance(entry, dict) else None for entry in entries]
        is_number = [isinstance(factor, int | float) and 0 <= factor <= _MOST for factor in factors]
        if not all(is_number) or not any(factors):
            raise ConfigError(
                f"the metadataset {url} has a blend whose {number} are {factors!r:.120}, not numbers above 0."
            )
        total = sum(float(factor or 0) for factor in factors)
        found = []
        for entry, factor in zip(entries, factors, strict=True):
            if not factor:
                continue  # Energon never draws it either
            for leaf in self._node(entry):
                if (leaf.repetitions if number == "weight" else leaf.weight) is not None:
                    raise ConfigError(
                        f"the metadataset {url} has blend and blend_epochized inside one another, so there is no one "
                        f"meaning of its shares; use one of them throughout"
                    )
                share = factor / total if number == "weight" else factor
                found.append(replace(leaf, **{number: share * (getattr(leaf, number) or 1.0)}))
        return found

    def _path(self, node: dict[str, Any]) -> list[_Leaf]:
        path = node["path"]
        if names_tars(path) or "#" in path or not path.isprintable():
            raise ConfigError(
                f"the metadataset {self.url} blends {path!r:.200}, which is not the folder of a dataset or another "
                f"metadataset; tars and patterns are sources of their own: name them beside it."
            )
        if path.endswith(".jsonl"):
            raise ConfigError(
                f"the metadataset {self.url} blends {path}, whose records lie outside of tars, so it cannot be "
                f"streamed as it is; convert it with vlm-stream make-shards, and name the result"
            )
        place = _resolve(split_url(self.url)[0], path)
        named = self.options.tars if self.options else ()
        if host_of(place) != host_of(self.url) and not any(is_under(place, each) for each in named):
            raise DatasetError(
                f"the metadataset {self.url} blends {place!r:.500}, which is on another host or in another bucket; "
                f"whoever wrote it could send you to any host with your credentials, so nothing is read there. If you "
                f"know that place, name it with --tars URL (tars of the store's options)"
            )
        if path.endswith((".yaml", ".yml")):
            return replace(self, url=place, depth=self.depth + 1).read()
        settings = {key: str(node[key]) for key in ("split_config", "dataset_config") if node.get(key)}
        if self.subflavors:
            settings["subflavors"] = quote(json.dumps(_as_json(self.subflavors, self.url), sort_keys=True))
        fragment = ";".join([self.split, *(f"{key}={value}" for key, value in settings.items())])
        return [_Leaf(path, f"{place}#{fragment}")]


def _resolve(root: str, path: str) -> str:
    if scheme_of(path) != "file" or posixpath.isabs(path):
        return path
    joined = join_url(root, path)
    prefix, sign, rest = joined.rpartition("://")
    return prefix + sign + posixpath.normpath(rest)


def _expand(patterns: Any, what: str, where: str) -> list[str]:
    """Return the names that a list of patterns stands for."""
    if not isinstance(patterns, list | None) or not all(isinstance(pattern, str) for pattern in patterns or ()):
        raise DatasetError(f"{where} has under '{what}' what is no list of names: {patterns!r:.120}")
    names: list[str] = []
    for pattern in patterns or ():
        names += expand_braces(pattern)
        if len(names) > _MAX_NAMES:
            raise DatasetError(f"{where} has more than {_MAX_NAMES} names under '{what}'.")
    return names


def _mapping(value: Any, what: str, where: str) -> dict[str, Any]:
    if not isinstance(value, dict | None):
        raise DatasetError(f"{where} has under '{what}' what is no mapping: {value!r:.120}")
    return {str(key): each for key, each in (value or {}).items()}


def _given_subflavors(settings: Mapping[str, str], where: str) -> dict[str, Any]:
    """Return the subflavors that a URL ends with."""
    try:
        return _mapping(json.loads(settings.get("subflavors", "{}")), "subflavors", where)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the subflavors behind {where} are no JSON ({error!r:.120}).") from error


def _as_json(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Return values that JSON can hold; YAML knows dates and sets, too."""
    try:
        json.dumps(values, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise DatasetError(f"the subflavors of {where} cannot be written as JSON ({error!r:.120}).") from error
    return values


def _check_size(value: Any, where: str) -> None:
    """Refuse what is nested without end, or refers to itself so often that it is large when it is written out."""
    rest, num_values = [(value, 0)], 0
    while rest:
        each, depth = rest.pop()
        num_values += 1
        if depth > _MAX_NESTED or num_values > _MAX_VALUES:
            raise DatasetError(f"{where} is nested too deep, or holds too much, so the dataset is unknown.")
        inner = (
            [*each, *each.values()] if isinstance(each, dict) else each if isinstance(each, list | set | tuple) else ()
        )
        rest += [(one, depth + 1) for one in inner]


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
    except Exception as error:  # its constructors raise whatever Python does: ValueError, RecursionError, IndexError
        raise DatasetError(f"{store.url(names[0])} is not YAML, so the dataset is unknown: {error}") from error
    _check_size(data, store.url(names[0]))
    if not isinstance(data, dict):
        raise DatasetError(f"{store.url(names[0])} holds {type(data).__name__}, not a mapping, so it says nothing.")
    return data
