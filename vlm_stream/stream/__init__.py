"""Stream: the room that joins the others into batches.

Enters: sources, a processor, options. Leaves: `VLMStream`, whose batches are ready for the model.

In the order the data meets them: `sources.py`, `options.py`, `world.py`, `processors.py` (what the user said),
`counting.py`, `datasets.py` (manifests and indexes: what the plan asks, where bytes lie), `planning.py`, `length.py`
(how many batches), `pipeline.py` (plan -> bytes -> batches), `position.py`, `state.py` (where they stand), `rows.py`
(samples, holes and fillers), `raw.py` (the same without a processor), `collators.py` (packed or padded),
`label_counts.py` (what a loss is divided by), `dataset.py` (the IterableDataset), `consumers.py` (who iterates).
"""

from __future__ import annotations

from vlm_stream.options import StreamOptions
from vlm_stream.recipe import SourceOptions, Sources, normalise_sources
from vlm_stream.stream.dataset import VLMStream
from vlm_stream.stream.label_counts import UnknownLabels
from vlm_stream.stream.length import LengthEstimate, count_rounds, estimate_length, is_endless, length_key
from vlm_stream.stream.pipeline import Delivery
from vlm_stream.stream.planning import open_planner
from vlm_stream.stream.position import Position
from vlm_stream.stream.processors import open_processor
from vlm_stream.stream.raw import RawSample
from vlm_stream.stream.state import STATE_KEY, RunState, find_states
from vlm_stream.stream.world import World, check_world, find_world

__all__ = [
    "STATE_KEY",
    "Delivery",
    "LengthEstimate",
    "Position",
    "RawSample",
    "RunState",
    "SourceOptions",
    "Sources",
    "StreamOptions",
    "UnknownLabels",
    "VLMStream",
    "World",
    "check_world",
    "count_rounds",
    "estimate_length",
    "find_states",
    "find_world",
    "is_endless",
    "length_key",
    "normalise_sources",
    "open_planner",
    "open_processor",
]
