"""NeMo Automodel's in-memory datasets, samplers, packing and loader, for data that fits in memory, under its names.

Enters: a list of samples (or anything with `len` and item access) and a processor. Leaves: encoded samples, packs,
orders of indices, loaders. Lengths are NeMo Automodel's approximations (`collate/estimate.py`); the planning is that of
`plan`. Must not be known here: shards, storage, streams.

    wrappers  RobustDatasetWrapper, PreTokenizedDatasetWrapper, PackedDatasetWrapper; make_robust_collate
    samplers  LengthGroupedSampler, BalancedPackSampler; greedy_knapsack, neat_pack_dataset_vlm
    configs   NeatPackConfig, configs of the wrappers and of the datasets
    loader    VlmDataloaderConfig: all of it in one call; set_image_pixel_bounds
    draft     batches for draft models: unshifted, with a loss_mask
    datum     Datum, collate_datums: token rows for reinforcement learning
    audio     speech with transcripts; collates for Qwen-Omni
"""

from vlm_stream.mapstyle.audio import (
    DEFAULT_USER_PROMPT,
    SOURCES,
    TARGET_SAMPLING_RATE,
    Source,
    build_multi_en_source_mix,
    make_hf_audio_asr_dataset,
    make_multi_en_asr_dataset,
    normalize_text,
    qwen2_5_omni_asr_collate_fn,
    qwen3_omni_asr_collate_fn,
)
from vlm_stream.mapstyle.configs import (
    CordV2DatasetConfig,
    Cv17DatasetConfig,
    LlavaOnevisionDatasetConfig,
    MedPixDatasetConfig,
    MockVlmDatasetConfig,
    NeatPackConfig,
    PackedDatasetWrapperConfig,
    PreTokenizedDatasetWrapperConfig,
    RdrDatasetConfig,
    ShopifyProductCatalogueDatasetConfig,
    Tulu3MagicoderTextMixDatasetConfig,
    UnimmChatDatasetConfig,
)
from vlm_stream.mapstyle.datum import Datum, collate_datums
from vlm_stream.mapstyle.draft import build_dspark_vlm_dataloader, dspark_vlm_collate_fn
from vlm_stream.mapstyle.loader import (
    RankedVlmDatasetConfig,
    VlmCollatorConfig,
    VlmDataloaderBuild,
    VlmDataloaderConfig,
    VlmProcessorConfig,
    VlmVideoProcessorConfig,
    read_chat_template,
    set_image_pixel_bounds,
)
from vlm_stream.mapstyle.samplers import (
    BalancedPackSampler,
    LengthGroupedSampler,
    greedy_knapsack,
    greedy_knapsack_vt_balanced,
    neat_pack_dataset_vlm,
)
from vlm_stream.mapstyle.wrappers import (
    PackedDatasetWrapper,
    PreTokenizedDatasetWrapper,
    RobustDatasetWrapper,
    make_robust_collate,
)
