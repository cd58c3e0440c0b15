"""Build: blueprints become batches.

Enters: a `BuildConfig` and blueprints. Leaves: a `Delivery` for each. It must not know plans, indexes, ranks or
processes.

In the order the data meets them: `builder.py` (fetch, encode, join, report), `rows.py` (samples, holes and fillers; the
same without a processor), `collators.py` (packed, padded, or the user's), `delivery.py` (what leaves; what a loss is
divided by). `digest.py` tells whether two configs build the same batches.
"""

from __future__ import annotations

from vlm_stream.build.builder import BuildConfig, Builder, Watch, encodes_samples
from vlm_stream.build.collators import choose_family
from vlm_stream.build.delivery import ITEM_COUNT, Delivery, UnknownLabels
from vlm_stream.build.rows import RawSample

__all__ = [
    "ITEM_COUNT",
    "BuildConfig",
    "Builder",
    "Delivery",
    "RawSample",
    "UnknownLabels",
    "Watch",
    "choose_family",
    "encodes_samples",
]
