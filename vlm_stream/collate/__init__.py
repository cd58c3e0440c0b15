"""Collate: conversations, encoded samples or packs become the batch that one model family takes.

Enters: examples `{"conversation": [...]}` for the functions named after families, encoded samples for `pad_collate_fn`
and the packs, packs for the packed collaters. Leaves: a dict of tensors. Labels are shifted already
(column t is to predict label t), so a model that shifts by itself must be given `shift_labels`; only `hf_packs` keeps
them unshifted. Must not be known here: shards, plans, ranks, and which samples belong together.

    rows           tensors along the tokens: padding, cutting, the shift by one token
    media          media of several rows -> one set; how many media each row has
    conversations  conversations through a processor, with labels
    family_steps   how single families call their processors, and which keys they add; `kimi` for Kimi's
    families       the table of families, and who may add to it
    functions      the collate functions under NeMo Automodel's names
    positions      multi-axis positions, from a config or through a model
    documents      the documents of a packed row, their lengths and masks; packing contracts
    packed         packed rows and batches for trainers that take document masks or THD
    hf_packs       packed rows and batches for `model(**batch, use_cache=False)` of a transformers model
"""

from vlm_stream.collate.documents import (
    BLOCK_CAUSAL,
    FLASH,
    PackingContract,
    align_up,
    as_documents,
    count_documents,
    document_mask_4d,
)
from vlm_stream.collate.estimate import (
    estimate_image_tokens,
    estimate_sample_length,
    estimate_video_tokens,
    extract_image_config,
    extract_video_config,
)
from vlm_stream.collate.families import (
    COLLATE_FNS,
    Family,
    family_of,
    find_family,
    get_collate,
    register_collate,
    register_family,
)
from vlm_stream.collate.family_steps import gemma4_inject_thinking_prefix
from vlm_stream.collate.functions import (
    default_collate_fn,
    gemma4_prefix_collate_fn,
    kimi_k25_vl_collate_fn,
    kimi_vl_collate_fn,
    llava_onevision_collate_fn,
    nemotron_omni_collate_fn,
    nemotron_parse_collate_fn,
    pad_collate_fn,
    phi4_mm_collate_fn,
    qwen2_5_collate_fn,
    qwen3_omni_collate_fn,
)
from vlm_stream.collate.hf_packs import ATTENTION_FORMS, Positions, build_hf_pack, join_hf_packs
from vlm_stream.collate.media import MediaJoinError, count_media, join_rows, media_of, merge_media
from vlm_stream.collate.packed import (
    PACKED_MEDIA_KEYS,
    build_packed_vlm_sample,
    length_table,
    neat_packed_vlm_collater,
    pack_row,
    packed_sequence_thd_vlm_collater,
)
from vlm_stream.collate.positions import (
    ModelPositions,
    PositionRule,
    WeightlessPositions,
    compute_mrope_position_ids,
    stack_positions,
)
from vlm_stream.collate.rows import pad_id_of, pad_rows, shift_sample
from vlm_stream.encode import build_labels, build_labels_from_template
