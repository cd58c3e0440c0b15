"""Collate: conversations, encoded samples or packs become the batch that one model family takes.

Enters: examples `{"conversation": [...]}` for the functions named after families, encoded samples for `pad_collate_fn`,
packs for the packed collaters. Leaves: a dict of tensors. The labels of every function here are shifted already: column
t is to predict label t, so a model that shifts by itself must be given `shift_labels`. Must not be known here: shards,
plans, ranks, and how packs are built.

Files: `rows.py` and `join_media.py` (padding, joining), `examples.py`, `process_batch.py` (conversations through a
processor), one file per family, `default.py`, `pad.py`, `packed.py`, `packed_thd.py`, `robust.py`, `registry.py`.
"""

from __future__ import annotations

from vlm_stream.collate.default import default_collate_fn
from vlm_stream.collate.gemma4_prefix import gemma4_inject_thinking_prefix, gemma4_prefix_collate_fn
from vlm_stream.collate.join_media import join_media
from vlm_stream.collate.kimi_k25 import kimi_k25_vl_collate_fn
from vlm_stream.collate.kimi_vl import kimi_vl_collate_fn
from vlm_stream.collate.llava_onevision import llava_onevision_collate_fn
from vlm_stream.collate.nemotron_omni import nemotron_omni_collate_fn
from vlm_stream.collate.nemotron_parse import nemotron_parse_collate_fn
from vlm_stream.collate.packed import neat_packed_vlm_collater
from vlm_stream.collate.packed_thd import packed_sequence_thd_vlm_collater
from vlm_stream.collate.pad import pad_collate_fn
from vlm_stream.collate.phi4_mm import phi4_mm_collate_fn
from vlm_stream.collate.qwen2_5 import qwen2_5_collate_fn
from vlm_stream.collate.qwen3_omni import qwen3_omni_collate_fn
from vlm_stream.collate.registry import COLLATE_FNS, get_collate, register_collate
from vlm_stream.collate.robust import make_robust_collate
from vlm_stream.collate.rows import pad_rows
from vlm_stream.encode import build_labels, build_labels_from_template

__all__ = [
    "COLLATE_FNS",
    "build_labels",
    "build_labels_from_template",
    "default_collate_fn",
    "gemma4_inject_thinking_prefix",
    "gemma4_prefix_collate_fn",
    "get_collate",
    "join_media",
    "kimi_k25_vl_collate_fn",
    "kimi_vl_collate_fn",
    "llava_onevision_collate_fn",
    "make_robust_collate",
    "neat_packed_vlm_collater",
    "nemotron_omni_collate_fn",
    "nemotron_parse_collate_fn",
    "packed_sequence_thd_vlm_collater",
    "pad_collate_fn",
    "pad_rows",
    "phi4_mm_collate_fn",
    "qwen2_5_collate_fn",
    "qwen3_omni_collate_fn",
    "register_collate",
]
