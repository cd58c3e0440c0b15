"""Convert: records become verified, indexed WebDataset tars; tars made elsewhere become usable as they are.

Enters: records, or tars. Leaves: `shard-*.tar`, an index for each, the ledger and `dataset.json`. Must not be known
here: plans, collation, how a model consumes a sample.

Files, in the order the data meets them: `options`, `job` (which record goes where, and what a restart must know),
`engines`, `processes`, `shard_task` (one shard), `media_bytes`, `web`, `sample`, `clip_tables`, `counting`, `tar`,
`rows` (the tar, the index and what lies beside it), `convert` (the whole); `tar_samples`, `foreign` (tars made
elsewhere), `energon`, `lerobot` (datasets of others), `in_place` (any URL becomes an opened dataset); `alone`,
`verify`, `recount`, `precount`, `stats`.
"""

from vlm_stream.convert.alone import user_cache
from vlm_stream.convert.convert import ShardReport, make_shards
from vlm_stream.convert.energon import open_blends
from vlm_stream.convert.foreign import IndexOptions, index_tars
from vlm_stream.convert.in_place import Need, index_urls, open_dataset
from vlm_stream.convert.options import ShardOptions
from vlm_stream.convert.precount import PrecountReport, precount
from vlm_stream.convert.recount import GuessFit, RecountReport, fit_guess, recount
from vlm_stream.convert.stats import DatasetStats, Histogram, dataset_stats, histogram_of
from vlm_stream.convert.verify import Problem, VerifyReport, verify_dataset
