"""NeMo Automodel's construction configs: values that YAML can write, each with a `build` for what comes at run time.

Enters: settings. Leaves: a config; its `build` leaves the dataset that the settings describe. The configs of datasets
hold the arguments of their factory, those of wrappers hold all but the datasets, processors and callbacks.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, make_dataclass
from typing import Any, ClassVar, Final, Literal

from vlm_stream.errors import ConfigError, nearest_name
from vlm_stream.mapstyle.samplers import neat_pack_dataset_vlm
from vlm_stream.mapstyle.wrappers import PackedDatasetWrapper, PreTokenizedDatasetWrapper
from vlm_stream.sources import (
    build_mock_vlm_dataset,
    make_cord_v2_dataset,
    make_cv17_dataset,
    make_llava_onevision_dataset,
    make_medpix_dataset,
    make_rdr_dataset,
    make_shopify_product_catalogue_dataset,
    make_tulu3_magicoder_text_mix_dataset,
    make_unimm_chat_dataset,
)

_FORMATS: Final = ("neat", "thd")


class _FactoryConfig:
    """The arguments of a dataset factory."""

    factory: ClassVar[Callable[..., Any]]

    def build(self) -> Any:
        """Call the factory with the fields."""
        return type(self).factory(**_arguments(self))


def _arguments(config: Any) -> dict[str, Any]:
    return {entry.name: getattr(config, entry.name) for entry in fields(config)}


def _config_of(name: str, factory: Callable[..., Any], fields: str, **defaults: Any) -> Any:
    """Return the config of a factory; a default that is not given is the factory's own."""
    own = inspect.signature(factory).parameters
    typed = [(one, own[one].annotation, defaults.get(one, own[one].default)) for one in fields.split()]
    about = {"factory": staticmethod(factory), "__doc__": f"Arguments of `{factory.__name__}`.", "__module__": __name__}
    return make_dataclass(name, typed, bases=(_FactoryConfig,), namespace=about)


RdrDatasetConfig = _config_of("RdrDatasetConfig", make_rdr_dataset, "path_or_dataset split")
CordV2DatasetConfig = _config_of(
    "CordV2DatasetConfig", make_cord_v2_dataset, "path_or_dataset split limit_dataset_samples"
)
MedPixDatasetConfig = _config_of("MedPixDatasetConfig", make_medpix_dataset, "path_or_dataset split")
LlavaOnevisionDatasetConfig = _config_of(
    "LlavaOnevisionDatasetConfig", make_llava_onevision_dataset, "path_or_dataset split"
)
UnimmChatDatasetConfig = _config_of("UnimmChatDatasetConfig", make_unimm_chat_dataset, "path_or_dataset split")
ShopifyProductCatalogueDatasetConfig = _config_of(
    "ShopifyProductCatalogueDatasetConfig",
    make_shopify_product_catalogue_dataset,
    "path_or_dataset split limit_dataset_samples",
)
Tulu3MagicoderTextMixDatasetConfig = _config_of(
    "Tulu3MagicoderTextMixDatasetConfig",
    make_tulu3_magicoder_text_mix_dataset,
    "tulu_split magicoder_split seed max_turns limit_total",
    tulu_split="train",
    magicoder_split="train",
)
Cv17DatasetConfig = _config_of(
    "Cv17DatasetConfig", make_cv17_dataset, "path_or_dataset split sampling_rate audio_column text_column"
)
MockVlmDatasetConfig = _config_of(
    "MockVlmDatasetConfig",
    build_mock_vlm_dataset,
    "num_samples num_images_per_sample image_size prompt responses max_length seed",
)


@dataclass
class PreTokenizedDatasetWrapperConfig:
    """Arguments of `PreTokenizedDatasetWrapper`."""

    max_length: int | None = None
    max_retries: int = 10
    truncate: bool = False
    inject_fake_images: bool = True
    post_tokenize_hook: Callable[[dict[str, Any], Any], dict[str, Any]] | None = None

    def build(self, *, dataset: Any, processor: Any) -> PreTokenizedDatasetWrapper:
        """Wrap a dataset of conversations."""
        return PreTokenizedDatasetWrapper(dataset, processor, **_arguments(self))


@dataclass
class PackedDatasetWrapperConfig:
    """Arguments of `PackedDatasetWrapper`."""

    pack_size: int = 2048
    sequence_alignment: int = 1
    max_retries: int = 10

    def build(
        self,
        *,
        inner_dataset: Any,
        bins: list[list[int]],
        padding_idx: int,
        get_rope_index: Callable[..., Any] | None = None,
    ) -> PackedDatasetWrapper:
        """Wrap a dataset of encoded samples."""
        return PackedDatasetWrapper(
            inner_dataset, bins, padding_idx=padding_idx, get_rope_index=get_rope_index, **_arguments(self)
        )


@dataclass
class NeatPackConfig:
    """How encoded samples are packed and their packs collated.

    Attributes:
        pack_size, drop_long_samples, max_packs, packing_ratio, balance_media_tokens: As for `neat_pack_dataset_vlm`.
        collate_max_length: Length of every batch; None: that of its longest pack.
        attn_implementation: Who attends; `flash_attention_*` wants cumulative lengths instead of a mask. The
            `packing_contract` of `VlmDataloaderConfig.build` says it too, and wins.
        packing_format: `neat` gives masks of documents, `thd` their lengths, for Transformer Engine.
    """

    pack_size: int = 2048
    drop_long_samples: bool = False
    max_packs: int | None = None
    packing_ratio: float = 1.0
    balance_media_tokens: bool = True
    collate_max_length: int | None = None
    attn_implementation: str | None = None
    packing_format: Literal["neat", "thd"] = "neat"

    def __post_init__(self) -> None:
        if self.packing_format not in _FORMATS:
            raise ConfigError(
                f"Unsupported VLM packing_format {self.packing_format!r}: packs have no such form; "
                f"{nearest_name(str(self.packing_format), _FORMATS)}"
            )

    def alignment(self, cp_size: int = 1) -> int:
        """Return the multiple to which documents are padded: context parallelism cuts each of them in 2 * cp_size."""
        if cp_size < 1:
            raise ConfigError(f"cp_size is {cp_size}, and there are no such ranks; give 1 or more.")
        alignment = 2 * cp_size if self.packing_format == "thd" and cp_size > 1 else 1
        if self.collate_max_length is not None and self.collate_max_length % alignment:
            raise ConfigError(
                f"collate_max_length {self.collate_max_length} is no multiple of {alignment} (2 * cp_size), so its "
                f"padding cannot be cut for {cp_size} ranks; round it."
            )
        return alignment

    def build(
        self,
        *,
        dataset: Any,
        padding_idx: int,
        ds_raw: Any = None,
        get_rope_index: Callable[..., Any] | None = None,
        processor: Any = None,
        cp_size: int = 1,
    ) -> PackedDatasetWrapper:
        """Plan packs of a dataset of encoded samples; arguments as for `neat_pack_dataset_vlm`."""
        return neat_pack_dataset_vlm(
            dataset,
            self.pack_size,
            padding_idx,
            self.drop_long_samples,
            self.max_packs,
            get_rope_index,
            ds_raw,
            self.packing_ratio,
            processor,
            self.balance_media_tokens,
            self.alignment(cp_size),
        )
