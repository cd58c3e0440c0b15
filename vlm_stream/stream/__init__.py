"""Stream: the room that joins the others into batches.

Enters: sources, a processor, options. Leaves: `VLMStream`, whose batches are ready for the model.

In the order the data meets them: `sources.py`, `options.py`, `world.py`, `processors.py` (what the user said),
`counting.py`, `datasets.py` (manifests and indexes: what the plan asks, where bytes lie), `planning.py`,
`pipeline.py` (plan -> bytes -> batches), `position.py` (where they stand), `rows.py` (samples, holes and fillers),
`raw.py` (the same without a processor), `collators.py` (packed or padded), `dataset.py` (the IterableDataset).
"""

from __future__ import annotations

from vlm_stream.stream.dataset import VLMStream
from vlm_stream.stream.options import StreamOptions
from vlm_stream.stream.pipeline import Delivery
from vlm_stream.stream.planning import open_planner
from vlm_stream.stream.position import Position
from vlm_stream.stream.processors import open_processor
from vlm_stream.stream.raw import RawSample
from vlm_stream.stream.sources import SourceOptions, Sources, normalise_sources

__all__ = [
    "Delivery",
    "Position",
    "RawSample",
    "SourceOptions",
    "Sources",
    "StreamOptions",
    "VLMStream",
    "normalise_sources",
    "open_planner",
    "open_processor",
]
