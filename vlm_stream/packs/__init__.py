"""Encoded samples -> one packed row.

Enters: what the encoder made of single samples (`input_ids`, `labels`, `attention_mask` of one length, media tensors),
and a position rule. Leaves: one row that holds them as documents that cannot see each other. Must not be known here:
which samples belong together (the plan decides), where they came from, which model trains.

    keys             which values run along the tokens, and which are media
    positions        PositionRule: multi-axis positions from a config alone
    model_positions  the same through a model's own `get_rope_index`
    shift            shift_sample: labels move by one, per document
    media            media of several samples -> one set
    fake_image       the image that text-only samples carry for the vision tower's sake, out of their way
    packed_sample    build_packed_vlm_sample: the row for trainers that take document masks or THD
    lengths          document lengths, cu_seqlens, THD fields
    masks            document numbers -> the 4-D mask
    hf_pack          build_hf_pack: the row for `model(**pack, use_cache=False)` of a transformers model
    hf_batch         join_hf_packs: several such rows -> one batch
"""

from vlm_stream.packs.hf_batch import count_media, join_hf_packs
from vlm_stream.packs.hf_pack import ATTENTION_FORMS, build_hf_pack
from vlm_stream.packs.keys import IGNORE, MEDIA_KEYS
from vlm_stream.packs.lengths import count_documents, cu_seqlens, thd_fields
from vlm_stream.packs.masks import document_mask_4d
from vlm_stream.packs.media import MediaJoinError, merge_media
from vlm_stream.packs.model_positions import ModelPositions, WeightlessPositions, compute_mrope_position_ids
from vlm_stream.packs.packed_sample import build_packed_vlm_sample
from vlm_stream.packs.positions import PositionRule
from vlm_stream.packs.shift import shift_sample

__all__ = [
    "ATTENTION_FORMS",
    "IGNORE",
    "MEDIA_KEYS",
    "MediaJoinError",
    "ModelPositions",
    "PositionRule",
    "WeightlessPositions",
    "build_hf_pack",
    "build_packed_vlm_sample",
    "compute_mrope_position_ids",
    "count_documents",
    "count_media",
    "cu_seqlens",
    "document_mask_4d",
    "join_hf_packs",
    "merge_media",
    "shift_sample",
    "thd_fields",
]

# The names under which the reference knows them.
_build_packed_vlm_sample = build_packed_vlm_sample
_compute_mrope_position_ids = compute_mrope_position_ids
_shift_sample = shift_sample
