"""Sources: JSON arrays, JSON lines, meta files and HF datasets become records, read by number.

Enters: paths or URLs of data, and how their columns and roles are called. Leaves: `RecordSource`s (`len`, `read(i)`),
whose records are conversations with the places of their media. This room does not look into media, count tokens or
know shards.

In the order in which data meets the files: `open_source` decides what the input is, `meta` reads meta files,
`local_file` (`remote_file`) makes bytes local, `data_file` scans them (`scan_lines`, `scan_array` -> `spans`) and
parses (`parse`) what is read, `sharegpt` maps an example (its `form`, `example_media`, `mismatch`) to a conversation,
`catalog` makes the `record`, `ratio` picks and deals, `group` joins. Beside that path: `meta_dataset` and
`load_json` load into memory, with `stats`; `hf_rows` and `hf_source` read HF datasets, which the `make_*` files
describe and `factories` names; `mock` makes samples up.
"""

from __future__ import annotations

from vlm_stream.sources.catalog import Catalog
from vlm_stream.sources.data_file import DataFile
from vlm_stream.sources.factories import FACTORIES, open_factory
from vlm_stream.sources.form import ShareGptForm
from vlm_stream.sources.group import SourceGroup
from vlm_stream.sources.hf_source import HFSource, MixedSource
from vlm_stream.sources.json2token import json2token
from vlm_stream.sources.load_json import load_json_or_jsonl, load_jsonl_for_rank
from vlm_stream.sources.make_audio import make_cv17_dataset
from vlm_stream.sources.make_chat import make_llava_onevision_dataset, make_unimm_chat_dataset
from vlm_stream.sources.make_image_text import (
    make_cord_v2_dataset,
    make_medpix_dataset,
    make_rdr_dataset,
    make_shopify_product_catalogue_dataset,
)
from vlm_stream.sources.make_sharegpt import make_sharegpt_dataset
from vlm_stream.sources.make_text import make_tulu3_dataset, make_tulu3_magicoder_text_mix_dataset
from vlm_stream.sources.meta_dataset import ExamplesWithStats, MetaDatasetConfig, make_meta_dataset
from vlm_stream.sources.mock import build_mock_vlm_dataset
from vlm_stream.sources.open_source import open_source
from vlm_stream.sources.ratio import rank_share, sample_order
from vlm_stream.sources.record import Record, RecordSource
from vlm_stream.sources.sharegpt import convert_sharegpt_to_conversation
from vlm_stream.sources.stats import collect_sample_stats, format_summary

# The names under which the reference keeps the same functions.
_convert_sharegpt_to_conversation = convert_sharegpt_to_conversation
_load_json_or_jsonl = load_json_or_jsonl
_load_jsonl_for_rank = load_jsonl_for_rank
_collect_sample_stats = collect_sample_stats
_ExamplesWithStats = ExamplesWithStats

__all__ = [
    "FACTORIES",
    "Catalog",
    "DataFile",
    "ExamplesWithStats",
    "HFSource",
    "MetaDatasetConfig",
    "MixedSource",
    "Record",
    "RecordSource",
    "ShareGptForm",
    "SourceGroup",
    "build_mock_vlm_dataset",
    "collect_sample_stats",
    "convert_sharegpt_to_conversation",
    "format_summary",
    "json2token",
    "load_json_or_jsonl",
    "load_jsonl_for_rank",
    "make_cord_v2_dataset",
    "make_cv17_dataset",
    "make_llava_onevision_dataset",
    "make_medpix_dataset",
    "make_meta_dataset",
    "make_rdr_dataset",
    "make_sharegpt_dataset",
    "make_shopify_product_catalogue_dataset",
    "make_tulu3_dataset",
    "make_tulu3_magicoder_text_mix_dataset",
    "make_unimm_chat_dataset",
    "open_factory",
    "open_source",
    "rank_share",
    "sample_order",
]
