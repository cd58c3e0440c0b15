"""Sources: JSON, Parquet, Arrow, meta files and HF datasets become records, read by number.

Enters: paths or URLs of data, and how their columns and roles are called. Leaves: `RecordSource`s (`len`, `read(i)`),
whose records are conversations with the places of their media. This room does not look into media, count tokens or
know shards.

In the order in which data meets the files: `open_source` decides what the input is and reads meta files, `local_file`
makes bytes local, `json_file` and `table_file` read raw examples by number, `forms` recognises what they are (of
`known_forms`) and `sharegpt` maps one to a conversation with its `example_media`, `catalog` chooses and deals, `record`
is what comes out. Next to that path: `meta_dataset` loads into memory; `hf_source` reads HF datasets, which `factories`
describes and names; `mock` makes samples up.
"""

from vlm_stream.sources.catalog import Catalog, load_json_or_jsonl, load_jsonl_for_rank, rank_share, sample_order
from vlm_stream.sources.factories import (
    FACTORIES,
    SHOPIFY_PRODUCT_CATALOGUE_PROMPT,
    json2token,
    make_cord_v2_dataset,
    make_cv17_dataset,
    make_llava_onevision_dataset,
    make_medpix_dataset,
    make_rdr_dataset,
    make_sharegpt_dataset,
    make_shopify_product_catalogue_dataset,
    make_tulu3_dataset,
    make_tulu3_magicoder_text_mix_dataset,
    make_unimm_chat_dataset,
    open_factory,
)
from vlm_stream.sources.forms import Recognised, ShareGptForm, held_media, recognise
from vlm_stream.sources.hf_source import HFSource, MixedSource, load_rows
from vlm_stream.sources.json_file import DataFile
from vlm_stream.sources.known_forms import FORMS
from vlm_stream.sources.meta_dataset import (
    ExamplesWithStats,
    MetaDatasetConfig,
    collect_sample_stats,
    make_meta_dataset,
)
from vlm_stream.sources.mock import build_mock_vlm_dataset
from vlm_stream.sources.open_source import open_source
from vlm_stream.sources.record import Record, RecordSource, SourceGroup
from vlm_stream.sources.sharegpt import apply_policy, convert_sharegpt_to_conversation, map_sharegpt
