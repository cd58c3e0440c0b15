"""LeRobot datasets (v3) in place: episodes are seconds of shared MP4 files, and their text is the task.

Enters: a folder with `meta/info.json`, `meta/episodes/**/*.parquet` and MP4 files. Leaves: for each MP4 file a tar of
its episodes' conversations, with an index that lists that file, where it is, among their members. No video is written
again. An episode is a sample of each camera; the camera is its entry.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from typing import Any, Final, NamedTuple

from vlm_stream.convert.foreign import IndexContext, IndexTask, Tars
from vlm_stream.convert.job import ShardPart, bad_sample
from vlm_stream.convert.media_bytes import KeptFile, MediaReader
from vlm_stream.convert.rows import ShardWriter
from vlm_stream.convert.shard_task import make_sample
from vlm_stream.errors import BadSampleError, ConfigError, StorageError, blame_sample
from vlm_stream.format import FieldMap, read_groups
from vlm_stream.sources import Record
from vlm_stream.storage import Store, StoreOptions, open_store

_INFO: Final = "meta/info.json"
_EPISODES: Final = "meta/episodes/"
_PLACE: Final = ("chunk_index", "file_index", "from_timestamp", "to_timestamp")
"""Columns of each camera: where an episode lies."""
_FIELD: Final = re.compile(r"\{(video_key|chunk_index|file_index)(?::0?([1-9])d)?\}")
_QUESTION: Final = "What does the robot do?"


class _Episode(NamedTuple):
    number: int
    camera: str
    start: float
    end: float
    task: str


def is_lerobot(store: Store) -> bool:
    """Tell whether a folder is a LeRobot dataset.

    Raises:
        ConfigError: It has another version of the format.
    """
    version = _read_info(store).get("codebase_version")
    if not isinstance(version, str):
        return False
    if not version.startswith("v3."):
        raise ConfigError(
            f"{store.root} is a LeRobot dataset {version}, and v3 is read in place: its episodes are parts of shared "
            f"files. Convert it with LeRobot's own tool (convert_dataset_v21_to_v30)."
        )
    return True


def lerobot_videos(store: Store, options: StoreOptions | None) -> Tars:
    """Return the MP4 files that episodes are in; their field map has a digest of what is known of these."""
    _episodes.cache_clear()  # the dataset may have grown
    found = _episodes(store.root, options)
    if not found:
        raise ConfigError(f"no episode of {store.root} has a video, so there is nothing to stream.")
    digest = hashlib.blake2b(repr(sorted(found.items())).encode(), digest_size=10).hexdigest()
    fields = FieldMap(layout="native", tags={"episodes": digest})
    return Tars(root=store.root, names=tuple(sorted(found)), fields=fields, index=_index_video)


def _read_info(store: Store) -> dict[str, Any]:
    try:
        info = json.loads(bytes(store.get(_INFO)))
    except (StorageError, ValueError, RecursionError):
        return {}
    return info if isinstance(info, dict) else {}


@cache
def _episodes(root: str, options: StoreOptions | None) -> dict[str, list[_Episode]]:
    """Return the episodes of each MP4 file, by its path."""
    import pyarrow as pa

    store = open_store(root, options)
    info = _read_info(store)
    features = info.get("features")
    known = features.items() if isinstance(features, dict) else ()
    cameras = [name for name, each in known if isinstance(each, dict) and each.get("dtype") == "video"]
    found: defaultdict[str, list[_Episode]] = defaultdict(list)
    for path in sorted(each.path for each in store.list(_EPISODES) if each.path.endswith(".parquet")):
        try:
            for where, episode in _read_episodes(bytes(store.get(path)), cameras, info.get("video_path")):
                found[where].append(episode)
        except (pa.ArrowException, KeyError, TypeError, ValueError, IndexError, OSError) as error:
            raise ConfigError(
                f"{store.url(path)} is no table of episodes of LeRobot v3 ({error!r:.200}), so the dataset cannot be "
                f"read in place. Copy or write it again."
            ) from error
    return {where: sorted(episodes) for where, episodes in found.items()}


def _read_episodes(data: bytes, cameras: list[str], video_path: Any) -> Iterator[tuple[str, _Episode]]:
    """Yield the episodes of one table, each with the path of its MP4 file."""
    places = [f"videos/{camera}/{name}" for camera in cameras for name in _PLACE]
    for table in read_groups(data, ["episode_index", "tasks", *places], texts=["tasks"]):
        for row in table.to_pylist():
            number, task = row["episode_index"], "; ".join(row["tasks"] or ())
            for camera in cameras:
                chunk, file, start, end = (row[f"videos/{camera}/{name}"] for name in _PLACE)
                if chunk is None:
                    continue  # the episode was not seen by this camera
                if not all(type(each) is int for each in (number, chunk, file)):
                    raise TypeError(f"{(number, chunk, file)!r:.120} are no numbers of an episode and of its file")
                if not all(isinstance(each, int | float) for each in (start, end)):
                    raise TypeError(f"{(start, end)!r:.120} are no seconds")
                yield _video_path(video_path, camera, chunk, file), _Episode(number, camera, start, end, task)


def _video_path(pattern: Any, camera: str, chunk: int, file: int) -> str:
    """Return the path of an MP4 file. Nothing but the three fields of LeRobot is filled in."""
    values = {"video_key": camera, "chunk_index": chunk, "file_index": file}

    def fill(field: re.Match[str]) -> str:
        name, width = field.groups()
        return str(values[name]) if width is None else f"{values[name]:0{int(width)}d}"

    path = _FIELD.sub(fill, pattern)
    if not set("{}").isdisjoint(_FIELD.sub("", pattern)) or not path.isprintable():
        raise ValueError(f"video_path is {pattern!r:.120}")
    return path


def _index_video(context: IndexContext, task: IndexTask) -> ShardPart:
    options = context.options.store
    store, out = open_store(context.tars.root, options), open_store(context.out, options)
    number, video = task
    url, name = store.url(video), f"{video}.tar"
    reader = MediaReader(options=options)
    reader.kept = KeptFile(url, bytes(store.get(video)), stays=True)
    with tempfile.TemporaryFile(buffering=0) as file:
        writer = ShardWriter(file)
        writer.name_outside(url, len(reader.kept.content))
        for each in _episodes(context.tars.root, options)[video]:
            try:
                _add(writer, each, reader, context)
            except Exception as fault:  # a file can hold anything
                blamed = blame_sample(fault, "convert", "bad_record", "the episode cannot be used")
                writer.bad.append(bad_sample(each.camera, _name(each), blamed, shard=name))
        crc32c = writer.finish()
        file.seek(0)
        out.put(name, file.read())
    return writer.write(out.put, number, name, num_bytes=writer.num_bytes, crc32c=crc32c)


def _add(writer: ShardWriter, episode: _Episode, reader: MediaReader, context: IndexContext) -> None:
    if not episode.task:
        raise BadSampleError("convert", "no_answer", "the episode has no task, so there is nothing to learn.")
    clip = {"type": "video", "video": reader.kept.where, "start": episode.start, "end": episode.end}
    record = Record(
        source=episode.camera,
        id=_name(episode),
        origin=reader.kept.where,
        conversation=[
            {"role": "user", "content": [clip, {"type": "text", "text": _QUESTION}]},
            {"role": "assistant", "content": [{"type": "text", "text": episode.task}]},
        ],
    )
    writer.add(_name(episode), *make_sample(record, reader, context.counter))


def _name(episode: _Episode) -> str:
    return f"episode-{episode.number:06d}"
