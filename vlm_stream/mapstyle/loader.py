"""One call for the whole map-style side: processor, dataset, packs, collation, sampler and loader of one rank.

Enters: a `VlmDataloaderConfig` (NeMo Automodel's names), the model's name, rank, world and batch size. Leaves:
torchdata's `StatefulDataLoader` and the processor. Which masks of packs the model takes is its packing contract.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from torch.utils.data import Sampler
from torch.utils.data.distributed import DistributedSampler

from vlm_stream.collate import (
    BLOCK_CAUSAL,
    FLASH,
    PackingContract,
    get_collate,
    neat_packed_vlm_collater,
    packed_sequence_thd_vlm_collater,
    pad_collate_fn,
    pad_id_of,
)
from vlm_stream.errors import ConfigError, require
from vlm_stream.mapstyle.configs import NeatPackConfig, PreTokenizedDatasetWrapperConfig
from vlm_stream.mapstyle.samplers import BalancedPackSampler, align_ranks
from vlm_stream.pp_media import wrap_vlm_collate_for_pp
from vlm_stream.processors import load_processor

logger = logging.getLogger(__name__)

_JINJA: Final = ("{%", "{{")
_EDGES: Final = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}


class RankedVlmDatasetConfig(Protocol):
    """A config whose dataset depends on the rank, such as `MetaDatasetConfig`."""

    builds_with_data_parallel_rank: bool

    def build(self, *, rank: int, world_size: int) -> Any:
        """Return the dataset of one rank."""


@dataclass(frozen=True)
class VlmVideoProcessorConfig:
    """What makes a video processor, and its arguments."""

    factory: Callable[..., Any]
    kwargs: dict[str, Any] = field(default_factory=dict)

    def build(self, *, pretrained_model_name_or_path: str) -> Any:
        """Make it, for this model unless `kwargs` name another."""
        return self.factory(**{"pretrained_model_name_or_path": pretrained_model_name_or_path, **self.kwargs})


@dataclass(frozen=True)
class VlmProcessorConfig:
    """What makes the processor (None: `AutoProcessor.from_pretrained`), its arguments, a video processor of its own."""

    factory: Callable[..., Any] | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    video_processor: VlmVideoProcessorConfig | None = None

    def build(self, *, pretrained_model_name_or_path: str) -> Any:
        """Make it.

        Raises:
            ConfigError: The model has none.
        """
        name, kwargs = pretrained_model_name_or_path, dict(self.kwargs)
        if self.video_processor is not None:
            kwargs["video_processor"] = self.video_processor.build(pretrained_model_name_or_path=name)
        return load_processor(name, **kwargs) if self.factory is None else self.factory(**kwargs)


@dataclass(frozen=True)
class VlmCollatorConfig:
    """A collate function `(examples, processor, **kwargs)` and its arguments."""

    factory: Callable[..., Any]
    kwargs: dict[str, Any] = field(default_factory=dict)

    def build(self, *, processor: Any) -> Callable[[list[Any]], Any]:
        """Bind the processor."""
        return partial(self.factory, processor=processor, **self.kwargs)


@dataclass(frozen=True)
class VlmDataloaderBuild:
    """What `VlmDataloaderConfig.build` leaves."""

    dataloader: Any
    processor: Any


@dataclass
class VlmDataloaderConfig:
    """The map-style input of a trainer.

    Attributes:
        dataset_config: Anything with `build()`; with `builds_with_data_parallel_rank` it is given rank and world size,
            with `accepts_tokenizer` the tokenizer.
        processor_config: How the processor is made.
        pretokenization: Encode samples in the workers; packing needs it.
        packing: Pack them.
        collator: A collate function of one's own; otherwise it follows from the above or the processor's class.
        chat_template: Replaces the processor's: Jinja text, or the path of a file that holds it, bare or as the
            `chat_template` of a JSON object.
        shuffle, num_workers, pin_memory, persistent_workers, prefetch_factor, drop_last: As for torch's loaders.
        seed: Of the shuffle.
    """

    dataset_config: Any
    processor_config: VlmProcessorConfig = field(default_factory=VlmProcessorConfig)
    pretokenization: PreTokenizedDatasetWrapperConfig | None = None
    packing: NeatPackConfig | None = None
    collator: VlmCollatorConfig | None = None
    chat_template: str | None = None
    shuffle: bool = True
    num_workers: int = 0
    pin_memory: bool = False
    persistent_workers: bool = False
    prefetch_factor: int | None = None
    drop_last: bool = False
    seed: int = 0

    def build(
        self,
        *,
        pretrained_model_name_or_path: str,
        dp_rank: int,
        dp_world_size: int,
        batch_size: int,
        dataset_build_context: AbstractContextManager[Any] | None = None,
        get_rope_index: Callable[..., Any] | None = None,
        packing_attn_implementation: str | None = None,
        packing_contract: PackingContract = BLOCK_CAUSAL,
        pp_n_microbatches: int | None = None,
        cp_size: int = 1,
    ) -> VlmDataloaderBuild:
        """Build everything.

        Args:
            pretrained_model_name_or_path: Whose processor it is.
            dp_rank: This data-parallel rank.
            dp_world_size: How many there are.
            batch_size: Rows of this rank's batches.
            dataset_build_context: Entered around the making of processor and dataset, such as to let one rank download
                first.
            get_rope_index: The model's method, a `PositionRule`, or None: positions of packs.
            packing_attn_implementation: As `NeatPackConfig.attn_implementation`; this one wins.
            packing_contract: Which masks the model takes: an object with `packed_mask_type` and
                `requires_packed_sequence_metadata`.
            pp_n_microbatches: Cut media for so many pipeline micro-batches.
            cp_size: Context-parallel ranks; with several, packs keep document numbers instead of `[B, 1, S, S]` masks,
                and THD documents are aligned to 2 * cp_size.
        """
        with dataset_build_context or nullcontext():
            processor = self._build_processor(pretrained_model_name_or_path)
            raw = self._build_dataset(processor, dp_rank, dp_world_size)
        dataset = raw
        if self.pretokenization is not None:
            if processor is None:
                raise ConfigError("pretokenization is asked for and there is no processor to encode with; name one.")
            dataset = self.pretokenization.build(dataset=raw, processor=processor)
        if self.packing is not None:
            if self.pretokenization is None:
                raise ConfigError("packing joins encoded samples, and nothing encodes them; give pretokenization too.")
            dataset = self.packing.build(
                dataset=dataset,
                padding_idx=pad_id_of(processor),
                ds_raw=raw,
                get_rope_index=get_rope_index,
                processor=processor,
                cp_size=cp_size,
            )
        attention = packing_attn_implementation or getattr(self.packing, "attn_implementation", None) or ""
        if packing_contract is BLOCK_CAUSAL and attention.startswith(FLASH):
            packing_contract = PackingContract("flash_varlen")
        collate = self._choose_collate(processor, packing_contract, cp_size)
        if hasattr(dataset, "robust_collate"):
            collate = dataset.robust_collate(collate)
        if pp_n_microbatches is not None:
            collate = wrap_vlm_collate_for_pp(collate, pp_n_microbatches)
        torchdata = require("torchdata.stateful_dataloader", "trainers", "A loader with a state")
        loader = torchdata.StatefulDataLoader(
            dataset=dataset,
            sampler=self._build_sampler(dataset, dp_rank, dp_world_size, batch_size),
            collate_fn=collate,
            batch_size=batch_size,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            persistent_workers=self.persistent_workers,
            prefetch_factor=self.prefetch_factor,
            drop_last=self.drop_last,
        )
        return VlmDataloaderBuild(loader, processor)

    def _build_processor(self, name: str) -> Any:
        try:
            processor = self.processor_config.build(pretrained_model_name_or_path=name)
        except ConfigError as error:
            if self.collator is None:
                raise
            logger.warning("The collator of this run gets no processor: %s", error)
            return None
        if self.chat_template is not None and processor is not None:
            template = read_chat_template(self.chat_template)
            if getattr(processor, "tokenizer", None) is None:
                raise ConfigError(
                    f"chat_template is to replace that of {type(processor).__name__}, which has no tokenizer to render "
                    f"it; leave it out."
                )
            processor.chat_template = processor.tokenizer.chat_template = template
        return processor

    def _build_dataset(self, processor: Any, rank: int, world_size: int) -> Any:
        config = self.dataset_config
        if getattr(config, "builds_with_data_parallel_rank", False):
            dataset = config.build(rank=rank, world_size=world_size)
        elif getattr(config, "accepts_tokenizer", False):
            dataset = config.build(tokenizer=getattr(processor, "tokenizer", processor))
        else:
            dataset = config.build()
        if not hasattr(dataset, "__len__"):
            raise ConfigError(
                f"{type(config).__name__} built a {type(dataset).__name__} without a length, which cannot be dealt out "
                f"to ranks by number; use StreamLoader for streams."
            )
        return dataset

    def _choose_collate(self, processor: Any, contract: PackingContract, cp_size: int) -> Callable[[Any], Any]:
        if self.packing is not None:
            form, length = self.packing.packing_format, self.packing.collate_max_length
            if form == "thd":
                return partial(packed_sequence_thd_vlm_collater, padding_idx=pad_id_of(processor), max_length=length)
            return partial(
                neat_packed_vlm_collater,
                padding_idx=pad_id_of(processor),
                max_length=length,
                packing=contract,
                materialize_4d_mask=cp_size == 1,
            )
        if self.collator is not None:
            return self.collator.build(processor=processor)
        chosen = pad_collate_fn if self.pretokenization is not None else get_collate(processor)
        return partial(chosen, processor=processor)

    def _build_sampler(self, dataset: Any, rank: int, world_size: int, batch_size: int) -> Sampler[int]:
        if getattr(self.dataset_config, "shard_data", False):
            # This rank holds a share of its own: dealing it out again would leave most of the data untouched.
            least = range(len(align_ranks(np.arange(len(dataset)))))
            return DistributedSampler(least, 1, 0, self.shuffle, self.seed)  # type: ignore[arg-type]
        if self.packing is not None and self.shuffle and any(dataset.visual_loads or ()):
            sampler = BalancedPackSampler(dataset, world_size, rank, batch_size, self.seed)
            if not len(sampler):
                raise ConfigError(
                    f"{len(dataset)} packs do not give each of {world_size} ranks {batch_size}, so there is no step; "
                    f"take smaller packs or batches, or balance_media_tokens off."
                )
            return sampler
        return DistributedSampler(dataset, world_size, rank, self.shuffle, self.seed)


def read_chat_template(template: str) -> str:
    """Return Jinja text: the text itself, or what the named file holds, bare or in a JSON object.

    Raises:
        ConfigError: It is neither.
    """
    if any(mark in template for mark in _JINJA):
        return template
    path = Path(template)
    if not path.is_file():
        raise ConfigError(
            f"chat_template {template!r} is neither Jinja text nor a file, so every chat would be rendered as these "
            f"words; give the template or the path of a file that holds it."
        )
    text = path.read_text(encoding="utf-8")
    try:
        held = json.loads(text)
    except json.JSONDecodeError:
        return text
    if not isinstance(held, dict) or not isinstance(held.get("chat_template"), str):
        raise ConfigError(
            f"the JSON of {template} has no 'chat_template', so there is nothing to render; name another file."
        )
    return str(held["chat_template"])


def set_image_pixel_bounds(processor: Any, *, max_pixels: int | None = None, min_pixels: int | None = None) -> None:
    """Limit how many pixels of an image the processor keeps, in whatever names its image processor reads.

    Without an image processor nothing happens. Answers that are generated for training need the same bounds.
    """
    images = getattr(processor, "image_processor", None)
    for name, value in (("max_pixels", max_pixels), ("min_pixels", min_pixels)):
        if images is None or value is None:
            continue
        size = getattr(images, "size", None) or {}
        for key in (name, _EDGES[name]):
            if key in size:
                size[key] = int(value)
        if _EDGES[name] not in size:  # where there are edges, transformers deprecates the attributes
            setattr(images, name, int(value))
