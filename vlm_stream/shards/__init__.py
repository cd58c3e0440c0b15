"""Shards: records become verified, indexed WebDataset tars; tars made elsewhere become usable as they are.

Enters: records, or tars. Leaves: `shard-*.tar`, an index for each, the ledger and `dataset.json`; and, for training,
`load_manifest`, `read_index` and `read_joint_index`. Must not be known here: plans, collation, how a model consumes a
sample.

In the order in which the data meets the files: `options`, `order` and `sizing` (which record goes where), `job` (what a
restart must know), `engines/`, `shard_task` (one shard), `media_bytes`, `sample`, `counting`, `tar`, `writer`, `rows`,
`schema`, `columns`, `index_columns`, `index`, `joint_index`, `flush`, `shard_list`, `manifest`, `layout`,
`convert` (the whole); `fields`, `foreign` (tars made elsewhere); `verify`, `recount`, `stats`.
"""

from __future__ import annotations

from vlm_stream.shards.convert import ShardReport, make_shards
from vlm_stream.shards.counting import load_processor, template_digest
from vlm_stream.shards.fields import FieldMap, is_text_member, to_conversation
from vlm_stream.shards.foreign import IndexOptions, index_tars
from vlm_stream.shards.index import ShardIndex, fetch_index, open_index, read_index
from vlm_stream.shards.joint_index import JointIndex, read_joint_index
from vlm_stream.shards.manifest import Manifest, load_manifest
from vlm_stream.shards.options import ShardOptions
from vlm_stream.shards.recount import RecountReport, recount
from vlm_stream.shards.shard_list import ShardEntry, Totals
from vlm_stream.shards.stats import DatasetStats, Histogram, dataset_stats
from vlm_stream.shards.verify import Problem, VerifyReport, verify_dataset

__all__ = [
    "DatasetStats",
    "FieldMap",
    "Histogram",
    "IndexOptions",
    "JointIndex",
    "Manifest",
    "Problem",
    "RecountReport",
    "ShardEntry",
    "ShardIndex",
    "ShardOptions",
    "ShardReport",
    "Totals",
    "VerifyReport",
    "dataset_stats",
    "fetch_index",
    "index_tars",
    "is_text_member",
    "load_manifest",
    "load_processor",
    "make_shards",
    "open_index",
    "read_index",
    "read_joint_index",
    "recount",
    "template_digest",
    "to_conversation",
    "verify_dataset",
]
