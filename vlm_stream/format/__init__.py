"""Format: how a dataset lies in a store; the read side.

Enters: a dataset's URL. Leaves: its manifest, columns for plans, and drawn samples (key, byte range, sizes of media);
and the conversation that the small files of a sample make. No tar is opened here. It must not know plans, processors or
how datasets are written.

Files, in the order the data meets them: `fields` (members of a sample -> conversation), `energon` (its sample types),
`manifest`, `table` (schema of an index), `media` (what plans need of a shard), `index` (all that is known of it),
`dataset` (all shards, within a bound of memory).
"""

from vlm_stream.format.dataset import Drawn, IndexCache, OpenDataset
from vlm_stream.format.energon import DEFAULT_PROMPTS, SAMPLE_FIELDS
from vlm_stream.format.fields import (
    LAYOUTS,
    MEDIA_EXTENSIONS,
    FieldMap,
    guess_fields,
    is_text_member,
    medium_of,
    own_names,
    to_conversation,
)
from vlm_stream.format.index import ShardIndex, decode_index, describe_shard, fetch_index, read_index
from vlm_stream.format.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    Manifest,
    ShardEntry,
    ShardList,
    TokenCounting,
    Totals,
    index_name,
    load_manifest,
    save_manifest,
)
from vlm_stream.format.table import index_schema, read_table, write_table

__all__ = [
    "DEFAULT_PROMPTS",
    "FORMAT_VERSION",
    "LAYOUTS",
    "MANIFEST",
    "MEDIA_EXTENSIONS",
    "SAMPLE_FIELDS",
    "Drawn",
    "FieldMap",
    "IndexCache",
    "Manifest",
    "OpenDataset",
    "ShardEntry",
    "ShardIndex",
    "ShardList",
    "TokenCounting",
    "Totals",
    "decode_index",
    "describe_shard",
    "fetch_index",
    "guess_fields",
    "index_name",
    "index_schema",
    "is_text_member",
    "load_manifest",
    "medium_of",
    "own_names",
    "read_index",
    "read_table",
    "save_manifest",
    "to_conversation",
    "write_table",
]
