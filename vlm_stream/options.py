"""The schema of a run: each option is declared once, with its type, its default and one sentence of help.

Python keywords, YAML recipes and the command line are read by it alone (`schema.py` checks them). Rooms get slices:
`StreamOptions.plan`, `.encode`, `.read`, `.shape`. Importing this module loads none of the rooms.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from vlm_stream.errors import ConfigError, nearest_name
from vlm_stream.schema import check_fields, check_names, option

if TYPE_CHECKING:
    from vlm_stream.encode import EncodeConfig
    from vlm_stream.media import MediaLimits
    from vlm_stream.plan import CostConfig, GroupConfig, PackConfig, PlainConfig, PlanConfig, StepShape
    from vlm_stream.storage import ReadOptions, StoreOptions
    from vlm_stream.tokens import FrameRule

logger = logging.getLogger(__name__)

Mode: TypeAlias = Literal["packed", "grouped", "plain"]
CollateFn: TypeAlias = Callable[[Sequence[Any], Any], dict[str, Any]]

RUN_ARGUMENTS: Final = ("sources", "processor", "rank", "world_size", "device_mesh", "options")
"""What `StreamLoader` and `VLMStream` take beside options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """How samples become batches."""

    mode: Mode = option(
        "packed",
        "Samples share rows (packed), rows have similar lengths (grouped), or samples in order (plain).",
        flag=True,
    )
    pack_size: int | None = option(None, "Tokens in a packed row.", least=1, flag=True)
    packing_ratio: float = option(
        1.0, "Share of pack_size that the plan fills: leaves room where token counts are estimates."
    )
    vision_size: int | None = option(None, "Most vision tokens in a packed row.", least=1)
    alignment: int = option(
        1, "Packed samples take multiples of this many tokens (context parallelism needs twice its size).", least=1
    )
    token_budget: int | None = option(
        None, "Grouped: most tokens of a batch, padding included; batch_size is then 1 group.", least=1
    )
    max_length: int | None = option(
        None, "Longest sample in tokens; packed rows are limited by pack_size in any case.", least=1, flag=True
    )
    long_samples: Literal["drop", "truncate", "raise"] = option(
        "drop", "Longer samples are noted in the ledger, cut (never through media), or an error."
    )
    batch_size: int = option(1, "Rows in a batch: packs, or samples.", least=1, flag=True)
    micro_batches: int = option(1, "Batches that a rank takes in one optimizer step.", least=1, flag=True)
    window: int = option(4096, "Samples that are packed or grouped at a time.", least=1, flag=True)
    seed: int = option(0, "Seed of the order of samples.", flag=True)
    epochs: int | None = option(1, "Epochs of one iteration; None: endless.", least=1)
    shuffle: bool = option(True, "Permute shards, samples and rows.")
    train: bool = option(
        True, "False, for evaluation: the order of the shards, every sample once, whatever shuffle and epochs say."
    )

    weigh_by: Literal["samples", "size", "tokens"] | None = option(
        None, "What weights of sources count; None: samples where weights are given, else size (sources end together)."
    )
    stop: Literal["all", "each", "first", "never"] | None = option(
        None,
        "A mixture's epoch ends when the first source has ended, all have, or each was delivered exactly once; None: "
        "first where weights are given, else each.",
    )
    group_shards: int = option(256, "Shards whose samples are shuffled as a whole.", least=1)
    run_length: int = option(1, "Neighbours that stay together, for stores where requests are expensive.", least=1)
    barrier: Literal["micro", "none", "step"] = option(
        "step", "Where ranks wait for each other, and so what is balanced: step (DDP), micro (FSDP), none."
    )
    horizon: int = option(1, "Steps that are balanced together.", least=1)
    allow: tuple[str, ...] = option(
        (), "Differences that a state may have when it is loaded: geometry, plan, sources, tokenizer."
    )

    fake_image: bool = option(
        False, "Give text-only rows an invisible image, so that every rank runs its vision tower."
    )
    fps: float | None = option(None, "Frames per second that are read of videos; None: what the processor says.")
    max_frames: int | None = option(None, "Most frames of a video; None: what the processor says.", least=1)
    frames: Literal["all", "keyframes"] = option(
        "all", "What the frames of a video are picked from: all of them, or keyframes, which decode fastest."
    )
    video_backend: Literal["auto", "av", "decord", "torchcodec"] = option(
        "auto", "What decodes videos; auto is av, and by frames where a clip has a table."
    )
    media_limits: MediaLimits | None = option(None, "The largest images, videos and audio that are decoded.")
    collate: str | CollateFn = option(
        "auto",
        "The form of batches: auto (of the processor's family, for transformers), neat or thd (NeMo Automodel's packed "
        "forms), the name of a family or of a registered processor class, or a function.",
        flag=True,
    )
    """A function is called with the rows and the processor, and returns a dict. A packed row is a list of encoded
    samples. Without a processor nothing can replace bad samples or fill the last step: rows may then be fewer, none at
    all, or empty. `collate_fn=` is another name of this option. See docs/families.md."""
    hf_labels: bool | None = option(
        None,
        "Labels for the loss of transformers, which shifts them; False: shifted here, as Automodel expects. None: "
        "True, but False where collate names one of Automodel's forms.",
    )
    attention: Literal["positions", "mask4d", "mask4d_bool", "indexed"] = option(
        "positions",
        "Packed documents are kept apart by positions (flash attention, SDPA, eager), a 4-D mask, or (neat) numbers.",
    )
    """With `collate="neat"`: `positions` and `mask4d_bool` give the bool mask for SDPA, `mask4d` one that is added to
    scores (eager), `indexed` the numbers of documents `[B, S]` for attn_implementation=flash_attention_*."""
    pad_rows: bool = option(
        False, "Pad packed rows to pack_size, for compiled models; otherwise to the longest of the batch."
    )
    pp_microbatches: int | None = option(None, "Cut media for this many pipeline micro-batches.", least=1)
    """Rows that are not packed get their multi-axis positions here too: later stages have nothing to compute them
    from."""
    pixels: Literal["full", "compact", True, False] = option(
        "full", "As the processor gives them (full, True), as bytes for finish_pixels (compact), or none (False)."
    )
    """Families without a compact path send full pixels and say so.

    False: the same tokens, labels, positions and grids, without pixels, for pipeline ranks without the first stage.
    They read the text of samples alone (past the cache, which holds whole shards) and decode nothing; plan and state
    are those of the other ranks. For families whose text follows from the sizes in the index (Qwen2-VL, Qwen2.5-VL,
    Qwen3-VL, GLM-4.6V).

    The limit: a sample with damaged media is a hole on ranks that decode it and tokens here, where its checksum, that
    of the whole sample, cannot be checked: labels and logits of that row would not belong together. `vlm-stream verify`
    finds damaged bytes before a run. During one, `with_refs` names the samples of each row: leave out a step for which
    the ranks of a pipeline have different `batch["refs"]`."""
    model_config: Any = option(
        None,
        "The model's config (or its config.json): its rule of positions, and its costs, by which ranks are balanced.",
    )
    """None: positions by what the processor tells, with the 2 tokens per second of the published Qwen2.5-VL
    checkpoints, and the costs of a 7B model. A config without the model's sizes leaves the costs at that."""
    with_refs: bool = option(False, 'Add batch["refs"]: source, shard, key, entry and own id of each sample.')

    bad_budget: float | None = option(0.01, "Share of bad samples above which the run stops; None: never.")
    prefetch_bytes: int = option(
        1 << 30,
        "Most bytes of batches that are begun and not yet taken, per rank; at least one batch per worker.",
        least=1,
        in_bytes=True,
    )
    max_inflight: int = option(32, "Requests at a time of each worker.", least=1)
    requests_per_s: float | None = option(None, "Most requests a second of each worker; None: no limit.", least=0.001)
    bytes_per_s: float | None = option(
        None, "Most bytes a second of each worker; None: no limit.", least=1, in_bytes=True
    )
    cache_dir: str | None = option(
        None, "Folder on a local disk that keeps whole shards of remote stores for all processes of the node."
    )
    cache_bytes: int | None = option(None, "Most bytes in cache_dir, such as 500G.", least=1, in_bytes=True)
    index_bytes: int = option(
        128 << 20,
        "Most bytes of shards' indexes that are kept in memory, per rank; those beyond are read again when needed.",
        least=0,
        in_bytes=True,
    )
    store: StoreOptions | None = option(None, "Endpoint, region and the like, for stores that need them.")

    def __post_init__(self) -> None:
        from vlm_stream.media import MediaLimits
        from vlm_stream.plan import OVERRIDES
        from vlm_stream.storage import StoreOptions

        if not isinstance(self.collate, str) and not callable(self.collate):
            raise ConfigError(f"collate is {self.collate!r}, which it cannot be: give a name, or a function")
        check_fields(self, StoreOptions, MediaLimits)
        if self.hf_labels is None:
            object.__setattr__(self, "hf_labels", callable(self.collate) or self.collate == "auto")
        if self.mode == "packed" and self.pack_size is None:
            raise ConfigError(
                "mode='packed' without pack_size: the capacity of a row is not known; set pack_size to the sequence "
                "length that you train with, or choose mode='grouped' or 'plain'"
            )
        if self.token_budget is not None and (self.mode != "grouped" or self.batch_size != 1):
            raise ConfigError(
                f"token_budget makes whole batches of groups, but mode is {self.mode!r} and batch_size is "
                f"{self.batch_size}; use mode='grouped' and batch_size=1 with it"
            )
        if self.bad_budget is not None and not 0 <= self.bad_budget <= 1:
            raise ConfigError(f"bad_budget is {self.bad_budget}, but it is a share of all samples: 0 to 1, or None")
        for name in self.allow:
            if name not in OVERRIDES:
                raise ConfigError(f"allow={name!r} is no override: {nearest_name(str(name), OVERRIDES)}")
        self.plan("")
        self.read()

    @classmethod
    def of(
        cls, options: StreamOptions | None, keywords: Mapping[str, Any], *, others: Sequence[str] = RUN_ARGUMENTS
    ) -> StreamOptions:
        """Return the options that a caller gave as one value or by keywords."""
        if options is None:
            return cls.parse(keywords, others=others)
        if keywords:
            raise ConfigError(
                f"options were given twice, as options= and as keywords ({', '.join(keywords)}), so it is not known "
                f"which are meant; give one of them, or dataclasses.replace(options, ...)"
            )
        return options

    @classmethod
    def parse(cls, options: Mapping[str, Any], *, others: Sequence[str] = ()) -> StreamOptions:
        """Return the options that a caller or a recipe spelled by name; nested ones (`store`) may be mappings.

        `others` are names that the caller takes itself: mentioned when an unknown one is refused.

        Raises:
            ConfigError: A name is unknown (the nearest one is named), or a value has the wrong type or meaning.
        """
        options = dict(options)
        if "collate_fn" in options:
            if "collate" in options:
                raise ConfigError("collate_fn is another name of collate, and both are given; give one of them")
            options["collate"] = options.pop("collate_fn") or "auto"
        check_names(cls, options, others)
        return cls(**options)

    def plan(self, geometry: str, *, text: str = "", weights_given: bool = False) -> PlanConfig:
        """Return what the plan must know; `geometry` and `text` identify how media and text were counted."""
        from vlm_stream.plan import BalanceConfig, MixtureConfig, OrderConfig, PlanConfig

        weigh_by = self.weigh_by or ("samples" if weights_given else "size")
        stop = self.stop or ("first" if weights_given else "each")
        return PlanConfig(
            seed=self.seed,
            window=self.window,
            shuffle=self.shuffle and self.train,
            epochs=self.epochs if self.train else 1,
            mode=self._mode(),
            order=OrderConfig(group_shards=self.group_shards, run_length=self.run_length),
            mixture=MixtureConfig(weigh_by=weigh_by, stop=stop if self.train else "each"),
            balance=BalanceConfig(barrier=self.barrier, horizon=self.horizon, costs=self._costs()),
            geometry=geometry,
            text=text,
        )

    def _mode(self) -> PackConfig | GroupConfig | PlainConfig:
        from vlm_stream.plan import GroupConfig, PackConfig, PlainConfig

        if self.mode == "packed":
            return PackConfig(
                pack_size=self.pack_size or 0,
                packing_ratio=self.packing_ratio,
                vision_size=self.vision_size,
                alignment=self.alignment,
                long_samples=self.long_samples,
            )
        if self.mode == "plain":
            return PlainConfig(max_tokens=self.max_length, long_samples=self.long_samples)
        return GroupConfig(max_tokens=self.max_length, token_budget=self.token_budget, long_samples=self.long_samples)

    def _costs(self) -> CostConfig:
        """Return what tokens and patches cost the model that trains, as far as its config tells."""
        from vlm_stream.plan import CostConfig, costs_of_model

        if self.model_config is None:
            return CostConfig()
        try:
            return costs_of_model(self.model_config)
        except (ConfigError, TypeError) as error:  # TypeError: sizes that differ between layers are lists
            logger.info("ranks are balanced by the costs of a 7B model, not by those of model_config: %s", error)
            return CostConfig()

    def shape(self, world_size: int) -> StepShape:
        """Return how steps are cut for that many ranks."""
        from vlm_stream.plan import StepShape

        return StepShape(world_size=world_size, micro_batches=self.micro_batches, batch_size=self.batch_size)

    def encode(self, frames: FrameRule) -> EncodeConfig:
        """Return how one sample becomes tensors."""
        from vlm_stream.encode import EncodeConfig
        from vlm_stream.media import DEFAULT_LIMITS

        return EncodeConfig(
            max_length=self.pack_size if self.mode == "packed" else self.max_length,
            overlong="truncate" if self.long_samples == "truncate" else "bad",
            inject_fake_image=self.fake_image,
            video_backend=self.video_backend,
            limits=self.media_limits or DEFAULT_LIMITS,
            frames=frames,
            pixels="compact" if self.pixels == "compact" else "full",
        )

    def read(self) -> ReadOptions:
        """Return how bytes are read; the cache holds whole shards, of which text alone is a small part."""
        from vlm_stream.storage import ReadOptions

        options = ReadOptions(
            max_inflight=self.max_inflight,
            requests_per_s=self.requests_per_s,
            bytes_per_s=self.bytes_per_s,
            cache_dir=self.cache_dir,
            cache_bytes=self.cache_bytes,
        )
        return options if self.pixels else replace(options, cache_dir=None, cache_bytes=None)


def flag_fields() -> list[Field[Any]]:
    """Return the options for which commands have a flag of their own."""
    return [each for each in fields(StreamOptions) if each.metadata["flag"]]
