"""All indexes of a small dataset in one object, so that a run with many shards need not ask for them one by one.

Enters: a store and a manifest. Leaves: `dataset.indexes.parquet` beside the manifest, whose digest the manifest states;
or the `ShardIndex` of any shard, cut out of it. It is a copy: where it is missing or not the one that the manifest
describes, the indexes of the shards say the same, only later.

Large datasets have none. A run shuffles over a few thousand samples at a time; where these lie in a handful of shards,
a handful of indexes is soon read, and all indexes of the dataset would not be.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from vlm_stream.errors import DatasetError, NotFoundError, StorageError
from vlm_stream.shards.index import ShardIndex, check_index, fetch_index, write_table
from vlm_stream.shards.index_columns import MEDIA, JointPlaces, decode_plan_columns, read_table
from vlm_stream.shards.layout import JOINT_INDEX
from vlm_stream.tokens import cut_columns

if TYPE_CHECKING:
    import pyarrow as pa

    from vlm_stream.shards.manifest import Manifest
    from vlm_stream.storage import Store

__all__ = ["JointIndex", "check_joint_index", "read_joint_index", "with_joint_index"]

_MIN_SHARDS: Final = 16
_MAX_SAMPLES: Final = 131_072
_THREADS: Final = 32


class JointIndex:
    """The indexes of all shards of a dataset."""

    def __init__(self, data: bytes, store: Store, manifest: Manifest) -> None:
        """Decode what plans need; where samples lie is decoded when it is asked for.

        Raises:
            DatasetError: The bytes are no index of that many samples.
        """
        self._data = data
        self._where = f"{store.root}/{JOINT_INDEX}"
        self._root = manifest.tars or store.root
        self._shards = manifest.shards
        self._bounds = list(accumulate((shard.totals.samples for shard in manifest.shards), initial=0))
        kinds = [kind for kind in MEDIA if any(getattr(shard.totals, kind) for shard in manifest.shards)]
        self._media, self._offset, self._size = decode_plan_columns(data, self._where, kinds)
        if len(self._offset) != self._bounds[-1]:
            raise DatasetError(f"{self._where} has {len(self._offset)} samples, the manifest says {self._bounds[-1]}.")

    def shard(self, number: int) -> ShardIndex:
        """Return the index of one shard."""
        shard = self._shards[number]
        begin, end = self._bounds[number : number + 2]
        return ShardIndex(
            media=cut_columns(self._media, begin, end),
            offset=self._offset[begin:end],
            size=self._size[begin:end],
            load_places=lambda: self._places.cut(begin, end),
            root=self._root,
            path=shard.name,
            shard_size=shard.totals.bytes,
            etag=shard.etag,
        )

    @cached_property
    def _places(self) -> JointPlaces:
        return JointPlaces(self._data, self._where)


def with_joint_index(store: Store, manifest: Manifest) -> Manifest:
    """Write the joint index of a dataset whose indexes are written, if it is to have one; return what to save."""
    if len(manifest.shards) < _MIN_SHARDS or manifest.totals.samples > _MAX_SAMPLES:
        return replace(manifest, joint_index_sha256="")
    data = write_table(_join(store, manifest))
    store.put(JOINT_INDEX, data)
    return replace(manifest, joint_index_sha256=hashlib.sha256(data).hexdigest())


def _join(store: Store, manifest: Manifest) -> pa.Table:
    """Return the rows of all indexes in the order of their shards.

    Raises:
        DatasetError: One of them is not the one that the manifest describes: what is joined would be trusted.
    """
    import pyarrow as pa

    with ThreadPoolExecutor(_THREADS) as pool:
        indexes = pool.map(lambda shard: fetch_index(store, shard), manifest.shards)
        tables = []
        for shard, data in zip(manifest.shards, indexes, strict=True):
            check_index(data, store, shard)
            tables.append(read_table(data, "index"))
        return pa.concat_tables(tables).combine_chunks()


def read_joint_index(store: Store, manifest: Manifest) -> JointIndex:
    """Read the joint index of a dataset whose manifest states one.

    Raises:
        DatasetError: It is missing, damaged, or not the one that the manifest describes.
    """
    return JointIndex(_fetch(store, manifest), store, manifest)


def check_joint_index(store: Store, manifest: Manifest) -> None:
    """Compare the joint index of a dataset whose manifest states one with the indexes of its shards.

    Raises:
        DatasetError: It is not there, or says something else, or one of the others cannot be read.
    """
    where = f"{store.root}/{JOINT_INDEX}"
    if not read_table(_fetch(store, manifest), where).equals(_join(store, manifest)):
        raise DatasetError(f"{where} does not hold what the indexes of the shards do.")


def _fetch(store: Store, manifest: Manifest) -> bytes:
    where = f"{store.root}/{JOINT_INDEX}"
    try:
        data = bytes(store.get(JOINT_INDEX))
    except NotFoundError as error:
        raise DatasetError(f"{where} is missing.") from error
    except StorageError as error:  # some stores say 403 of what is not there
        raise DatasetError(f"{where} could not be read: {error}") from error
    if hashlib.sha256(data).hexdigest() != manifest.joint_index_sha256:
        raise DatasetError(f"{where} is not the one that the manifest describes.")
    return data
