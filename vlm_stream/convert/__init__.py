"""Convert: records become verified, indexed WebDataset tars; tars made elsewhere become usable as they are.

Enters: records, or tars. Leaves: `shard-*.tar`, an index for each, the ledger and `dataset.json`. Must not be known
here: plans, collation, how a model consumes a sample.

Files, in the order the data meets them: `options`, `job` (which record goes where, and what a restart must know),
`engines`, `shard_task` (one shard), `media_bytes`, `sample`, `counting`, `tar`, `rows` (the tar and the index),
`convert` (the whole); `foreign` (tars made elsewhere); `verify`, `recount`, `stats`.
"""

from __future__ import annotations

from vlm_stream.convert.convert import ShardReport, make_shards
from vlm_stream.convert.foreign import IndexOptions, index_tars
from vlm_stream.convert.options import ShardOptions
from vlm_stream.convert.precount import PrecountReport, precount
from vlm_stream.convert.recount import GuessFit, RecountReport, fit_guess, recount
from vlm_stream.convert.stats import DatasetStats, Histogram, dataset_stats
from vlm_stream.convert.verify import Problem, VerifyReport, verify_dataset

__all__ = [
    "DatasetStats",
    "GuessFit",
    "Histogram",
    "IndexOptions",
    "PrecountReport",
    "Problem",
    "RecountReport",
    "ShardOptions",
    "ShardReport",
    "VerifyReport",
    "dataset_stats",
    "fit_guess",
    "index_tars",
    "make_shards",
    "precount",
    "recount",
    "verify_dataset",
]
