"""Format: how a dataset lies in a store; the read side.

Enters: a dataset's URL. Leaves: its manifest, columns for plans, and drawn samples (key, byte range, sizes of media);
and the conversation that the small files of a sample make. No tar is opened here. It must not know plans, processors or
how datasets are written.

Files, in the order the data meets them: `guess` (which layout tars have), `fields` (members of a sample ->
conversation), `energon` (its sample types), `manifest`, `table` (schema of an index), `media` (what plans need of a
shard), `index` (all that is known of it), `dataset` (all shards, within a bound of memory).
"""

from vlm_stream.format.checks import MOST_OF_MEDIUM
from vlm_stream.format.dataset import Drawn, IndexCache, OpenDataset, check_place
from vlm_stream.format.energon import DEFAULT_PROMPTS, SAMPLE_FIELDS
from vlm_stream.format.fields import (
    LAYOUTS,
    MEDIA_EXTENSIONS,
    FieldMap,
    are_tokens_short,
    is_text_member,
    keep_tokens,
    medium_of,
    own_names,
    read_sample,
    read_tokens,
    to_conversation,
)
from vlm_stream.format.guess import complete_fields, guess_fields
from vlm_stream.format.index import (
    ShardIndex,
    TablePlace,
    clip_bytes,
    decode_index,
    describe_shard,
    fetch_index,
    read_index,
)
from vlm_stream.format.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    Manifest,
    ShardEntry,
    ShardList,
    TokenCounting,
    Totals,
    clips_name,
    index_name,
    load_manifest,
    save_manifest,
    texts_name,
)
from vlm_stream.format.table import (
    CLIP_COLUMNS,
    KEYFRAMES,
    TEXT_COLUMN,
    index_schema,
    read_groups,
    read_table,
    write_table,
)
