"""The settings of a stream, checked once, and what they mean for the rooms below."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args

from vlm_stream.collate import ATTENTION_FORMS
from vlm_stream.encode import EncodeConfig
from vlm_stream.errors import ConfigError, nearest_name
from vlm_stream.plan import (
    OVERRIDES,
    BalanceConfig,
    GroupConfig,
    MixtureConfig,
    OrderConfig,
    PackConfig,
    PlainConfig,
    PlanConfig,
    StepShape,
)
from vlm_stream.storage import ReadOptions, StoreOptions

if TYPE_CHECKING:
    from vlm_stream.tokens import FrameRule

__all__ = ["CollateFn", "Mode", "StreamOptions"]

Mode: TypeAlias = Literal["packed", "grouped", "plain"]
CollateFn: TypeAlias = Callable[[Sequence[Any], Any], dict[str, Any]]

_COUNTS = (
    "pack_size",
    "max_length",
    "batch_size",
    "micro_batches",
    "window",
    "epochs",
    "pp_microbatches",
    "prefetch_bytes",
    "token_budget",
    "vision_size",
    "alignment",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """How samples become batches."""

    mode: Mode = "packed"
    """`packed`: samples share a row of `pack_size` tokens; `grouped`: rows of similar length; `plain`: in order."""
    pack_size: int | None = None
    """Tokens in a packed row."""
    packing_ratio: float = 1.0
    """Share of `pack_size` that the plan fills: head-room where token counts are estimates."""
    vision_size: int | None = None
    """Most vision tokens in a packed row."""
    alignment: int = 1
    """Packed samples take multiples of so many tokens (context parallelism wants twice its size)."""
    token_budget: int | None = None
    """Grouped: most tokens of a batch, padding included; `batch_size` is then 1 group. None: `batch_size` rows."""
    max_length: int | None = None
    """Longest sample. Packed rows have `pack_size` as their limit in any case."""
    long_samples: Literal["drop", "truncate", "raise"] = "drop"
    """What happens to longer samples: a line in the ledger, a cut (never through media), or an error."""
    batch_size: int = 1
    """Rows in a batch: packs, or samples."""
    micro_batches: int = 1
    """Batches that a rank consumes in one optimizer step."""
    window: int = 4096
    """Samples that are packed or grouped at a time."""
    seed: int = 0
    epochs: int | None = 1
    """None streams for ever."""
    shuffle: bool = True
    train: bool = True
    """False: for evaluation. Order of the shards, every sample once, whatever `shuffle` and `epochs` say."""

    weigh_by: Literal["samples", "size", "tokens"] | None = None
    """What the sources' weights count. None: `samples` where weights are given, else `size`: sources end together."""
    stop: Literal["all", "each", "first", "never"] | None = None
    """When a mixture has had an epoch: when the first source has, all have, or each has had exactly one. None: the
    first where weights are given, else each: a list of datasets delivers all of them."""
    group_shards: int = 256
    """Shards whose samples are shuffled as a whole."""
    run_length: int = 1
    """Neighbours that stay together, for stores where requests are dear."""
    barrier: Literal["micro", "none", "step"] = "step"
    """Where ranks wait for each other, and so what is balanced: `step` (DDP), `micro` (FSDP), `none`."""
    horizon: int = 1
    """Steps that are balanced together."""
    allow: tuple[str, ...] = ()
    """Differences that a state may have: `geometry`, `plan`, `sources`, `tokenizer`."""

    fake_image: bool = False
    """Give text-only rows an invisible image, so that every rank runs its vision tower."""
    fps: float | None = None
    """Frames per second that are read of videos; None: what the processor says."""
    max_frames: int | None = None
    """Most frames of a video; None: what the processor says."""
    video_backend: Literal["auto", "av", "decord", "torchcodec"] = "auto"
    hf_labels: bool = True
    """Labels for transformers' own loss, which shifts them. False: shifted already, as the reference's collates do."""
    attention: str = "positions"
    """How packed documents are kept apart: by `positions` (flash attention, SDPA, eager), or by a 4-D mask (`mask4d`,
    `mask4d_bool`)."""
    pad_rows: bool = False
    """Pad packed rows to `pack_size`, for compiled models; otherwise to the longest of the batch."""
    collate_fn: CollateFn | None = None
    """Called with the rows and the processor instead of our own collation, returns a dict; a packed row is a list of
    samples. Without a processor nothing can stand in for what is bad or fills the last step: rows may then be fewer,
    none at all, or empty."""
    pp_microbatches: int | None = None
    """Cut media for so many pipeline micro-batches. Rows that are not packed get their multi-axis positions here too,
    because stages behind the first have nothing to compute them from."""
    pixels: Literal["full", "compact"] | bool = "full"
    """`full` (or True): as the processor gives them. `compact`: workers send bytes, and `finish_pixels` (or a loader
    with `device`) makes the processor's pixels of them; families without a compact path send full ones and say so.

    False: batches have the same tokens, labels, positions and grids, and no pixels. For pipeline ranks without the
    first stage: they read the text of samples alone (past the cache, of which only whole shards make sense) and decode
    nothing. Plan and state are those of the other ranks. For families whose text follows from the sizes in the index
    (Qwen2-VL, Qwen2.5-VL, Qwen3-VL, GLM-4.6V).

    The limit: a sample with damaged media is a hole on ranks that decode it and tokens here, where not even its text
    can be checked (the checksum is that of the whole sample); labels and logits of that row would not belong together.
    `vlm-stream verify` finds damaged bytes before a run. During one, `with_refs` names the samples of each row: leave
    out a step for which the ranks of a pipeline have different `batch["refs"]`."""
    model_config: Any = None
    """The model's config (or its `config.json` as a mapping): where multi-axis positions are computed here, it says by
    which rule. None: what the processor tells, with the 2 tokens per second of the published Qwen2.5-VL checkpoints."""
    with_refs: bool = False
    """Add `batch["refs"]`: source, shard and key of each sample in each row."""

    bad_budget: float | None = 0.01
    """Share of bad samples above which the run stops; None never stops it."""
    prefetch_bytes: int = 64 << 20
    """Bytes that each worker reads ahead."""
    cache_dir: str | None = None
    """Folder on a local disk that keeps whole shards of remote stores for all processes of the node."""
    cache_bytes: int | None = None
    """Limit of that folder."""
    store: StoreOptions | None = None
    """Endpoint, region and the like, for stores that need them."""

    def __post_init__(self) -> None:
        """Refuse settings that cannot be meant."""
        _check_choices({name: getattr(self, name) for name in _CHOICES})
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} is {value!r}, but it counts something: give a whole number of at least 1")
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
    def of(cls, options: StreamOptions | None, keywords: Mapping[str, Any], *, others: Sequence[str]) -> StreamOptions:
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
        """Return the options that a caller or a recipe spelled by name.

        Args:
            options: Values by name; nested ones (`store`) may be mappings.
            others: Names that the caller takes itself: mentioned when an unknown one is refused.

        Raises:
            ConfigError: A name is unknown (the nearest one is named), or a value has the wrong type or meaning.
        """
        for name in options:
            if name not in _DECLARED:
                raise ConfigError(f"there is no option '{name}'; {nearest_name(name, [*_DECLARED, *others])}")
        _check_choices(options)
        if all(name in _CHOICES or _has_type(value, _DECLARED[name]) for name, value in options.items()):
            return cls(**options)
        # Only where something has to be converted or refused: importing it takes longer than reading a manifest.
        from pydantic import TypeAdapter, ValidationError

        try:
            return TypeAdapter(cls).validate_python(dict(options))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            sentence = first["msg"].removeprefix("Value error, ")
            if first["type"] == "value_error":
                raise ConfigError(sentence) from None
            place = ".".join(str(part) for part in first["loc"])
            raise ConfigError(
                f"{place} is {first['input']!r}, which it cannot be: {sentence[:1].lower()}{sentence[1:]}"
            ) from None

    def plan(self, geometry: str, *, text: str = "", epochs_before: int = 0, weights_given: bool = False) -> PlanConfig:
        """Return what the plan must know; `geometry` and `text` identify how media and text were counted."""
        epochs = self.epochs if self.train else 1
        weigh_by = self.weigh_by or ("samples" if weights_given else "size")
        stop = self.stop or ("first" if weights_given else "each")
        return PlanConfig(
            seed=self.seed,
            window=self.window,
            shuffle=self.shuffle and self.train,
            epochs=None if epochs is None else epochs + epochs_before,
            mode=self._mode(),
            order=OrderConfig(group_shards=self.group_shards, run_length=self.run_length),
            mixture=MixtureConfig(weigh_by=weigh_by, stop=stop if self.train else "each"),
            balance=BalanceConfig(barrier=self.barrier, horizon=self.horizon),
            geometry=geometry,
            text=text,
        )

    def _mode(self) -> PackConfig | GroupConfig | PlainConfig:
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

    def shape(self, world_size: int) -> StepShape:
        """Return how steps are cut for that many ranks."""
        return StepShape(world_size=world_size, micro_batches=self.micro_batches, batch_size=self.batch_size)

    def encode(self, frames: FrameRule) -> EncodeConfig:
        """Return how one sample becomes tensors."""
        return EncodeConfig(
            max_length=self.pack_size if self.mode == "packed" else self.max_length,
            overlong="truncate" if self.long_samples == "truncate" else "bad",
            inject_fake_image=self.fake_image,
            video_backend=self.video_backend,
            frames=frames,
            pixels="compact" if self.pixels == "compact" else "full",
        )

    def read(self) -> ReadOptions:
        """Return how bytes are read."""
        options = ReadOptions(
            prefetch_bytes=self.prefetch_bytes,
            cache_dir=self.cache_dir,
            cache_bytes=self.cache_bytes,
            missing_is_bad=True,
        )
        return options if self.pixels else replace(options, cache_dir=None, cache_bytes=None)


_DECLARED: Final = {field.name: str(field.type) for field in fields(StreamOptions)}
_CHOICES: dict[str, Sequence[str | bool | None]] = {
    "mode": get_args(Mode),
    "long_samples": ("drop", "raise", "truncate"),
    "weigh_by": ("samples", "size", "tokens", None),
    "stop": ("all", "each", "first", "never", None),
    "barrier": ("micro", "none", "step"),
    "video_backend": ("auto", "av", "decord", "torchcodec"),
    "pixels": ("compact", "full", True, False),
    "attention": ATTENTION_FORMS,
}


def _has_type(value: Any, declared: str) -> bool:
    """Tell whether a value is of one of the types that a field names; False where that takes more than a look."""
    types = declared.split(" | ")
    return ("None" if value is None else type(value).__name__) in types or ("CollateFn" in types and callable(value))


def _check_choices(options: Mapping[str, Any]) -> None:
    for name, allowed in _CHOICES.items():
        if name in options and options[name] not in allowed:
            names = [str(one) for one in allowed if one is not None]
            raise ConfigError(f"{name} is {options[name]!r}; {nearest_name(str(options[name]), names)}")
