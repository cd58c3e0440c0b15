"""Sources: JSON arrays, JSON lines, meta files and HF datasets become records, read by number.

Enters: paths or URLs of data, and how their columns and roles are called. Leaves: `RecordSource`s (`len`, `read(i)`),
whose records are conversations with the places of their media. This room does not look into media, count tokens or
know shards.

In the order in which data meets the files: `open_source` decides what the input is, `meta` reads meta files,
`local_file` makes bytes local, `data_file` scans them (`scan_lines`, `scan_array` -> `spans`) and parses (`parse`) what
is read, `sharegpt` maps an example (its `form`, `example_media`, `mismatch`) to a conversation, `catalog` makes the
`record`, `ratio` picks and orders, `group` joins.
"""

from __future__ import annotations

from vlm_stream.sources.catalog import Catalog
from vlm_stream.sources.data_file import DataFile
from vlm_stream.sources.form import ShareGptForm
from vlm_stream.sources.group import SourceGroup
from vlm_stream.sources.open_source import open_source
from vlm_stream.sources.ratio import rank_share, sample_order
from vlm_stream.sources.record import Record, RecordSource
from vlm_stream.sources.sharegpt import convert_sharegpt_to_conversation

_convert_sharegpt_to_conversation = convert_sharegpt_to_conversation

__all__ = [
    "Catalog",
    "DataFile",
    "Record",
    "RecordSource",
    "ShareGptForm",
    "SourceGroup",
    "_convert_sharegpt_to_conversation",
    "convert_sharegpt_to_conversation",
    "open_source",
    "rank_share",
    "sample_order",
]
