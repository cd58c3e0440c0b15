"""The values that enter and leave the plan, and its config.

Enters: `SourceSpec` (shard sizes of a manifest), `SampleColumns` (costs of samples, read on demand by a
`ColumnReader`), `PlanConfig` (everything but the data) and `StepShape` (what a step is cut for). Leaves: `Ref`, and
`Dropped` for what is left out. `PlanConfig` holds one class for each stage: `OrderConfig`, `MixtureConfig`, the mode
(`PackConfig`, `GroupConfig` or `PlainConfig`), `BalanceConfig` with `CostConfig`. Nothing here knows files or tensors.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from vlm_stream.errors import ConfigError, nearest_name

Ints = npt.NDArray[np.int64]

_WEIGH_BY = ("samples", "size", "tokens")
_STOP = ("all", "each", "first", "never")
_BARRIERS = ("micro", "none", "step")
_LONG = ("drop", "raise", "truncate")
_UNITS_PER_TOKEN: Final = 1024.0  # resolution of costs as whole numbers: one text token costs this much

RowPolicy: TypeAlias = Literal["free", "sorted", "stream"]
"""Which units may share a micro-batch: any (packs), neighbours in length (grouped samples: others would add padding),
or neighbours in the stream (plain samples: what stands together stays random)."""


class Ref(NamedTuple):
    """How a plan names a sample."""

    source: int
    shard: int
    row: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleColumns:
    """What the plan must know of n samples, of one shard or of several one after the other."""

    tokens: npt.NDArray[np.int64]  # [n] Length in tokens, media included
    vision_tokens: npt.NDArray[np.int64]  # [n] How many of the tokens stand for images and videos
    vision_patches: npt.NDArray[np.int64]  # [n] Patches that enter the vision tower
    vision_squares: npt.NDArray[np.float64]  # [n] Sum over images of patches squared
    labels: npt.NDArray[np.int64]  # [n] Tokens that are learned; -1: unknown
    decode: npt.NDArray[np.int64] | None = None  # [n] What decoding its videos costs; 0: not known. None: of none

    def __len__(self) -> int:
        return len(self.tokens)

    def pick(self, rows: Ints) -> "SampleColumns":
        """Return some of the samples, in ascending order of their rows."""
        columns: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self)}
        picked: dict[str, Any] = {name: None if each is None else each[rows] for name, each in columns.items()}
        return SampleColumns(**picked)


class Countable(Protocol):
    """Samples of some shards whose columns are counted when they are asked for."""

    def __len__(self) -> int:
        """Return how many samples there are."""

    def pick(self, rows: Ints) -> SampleColumns:
        """Return the columns of some samples, in ascending order of their rows."""


ColumnReader: TypeAlias = Callable[[int, Sequence[int]], Countable]
"""`read(source, shards)` returns the samples of these shards, one after the other; called only for shards in use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSpec:
    """One source of a mixture, as its manifest describes it."""

    name: str
    samples_per_shard: tuple[int, ...]
    digest: str
    """Changes when any shard or index of the source changes."""
    weight: float = 1.0
    sample_ratio: float = 1.0
    """Share of the source that one of its epochs delivers. Below 1, each epoch chooses which samples it leaves out;
    above 1, some or all samples come more than once."""
    tokens_per_sample: float = 1.0
    """Mean length: what turns a weight in tokens into a weight in samples."""
    num_samples: int = field(init=False)

    def __post_init__(self) -> None:
        if not (0 <= self.sample_ratio < float("inf") and 0 < self.tokens_per_sample < float("inf")):
            raise ConfigError(
                f"Source '{self.name}' has sample_ratio={self.sample_ratio} and "
                f"tokens_per_sample={self.tokens_per_sample}. Give a finite ratio of 0 or more, and a mean above 0."
            )
        object.__setattr__(self, "num_samples", sum(self.samples_per_shard))


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """A sample that the plan left out or shortened, and why."""

    ref: Ref
    reason: str  # `too_long`, `too_much_vision` or `truncated`: the last one is delivered, cut to the limit
    tokens: int
    vision_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderConfig:
    """How far samples are shuffled."""

    group_shards: int = 256
    """Shards whose samples are permuted as a whole. More: better mixed, more indexes live at once."""
    run_length: int = 1
    """Neighbouring samples that stay together. More: fewer requests to the store, a worse mix."""

    def __post_init__(self) -> None:
        _check_least(self, "group_shards", "run_length")


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureConfig:
    """How sources are mixed."""

    weigh_by: str = "samples"
    """What weights count: `samples` or `tokens` drawn from each source; `size`: epochs of each, so that equal weights
    finish all sources together."""
    stop: str = "first"
    """A run of n epochs ends when the `first` source has delivered n epochs; when `all` have (shorter ones go on
    into further epochs meanwhile); when `each` has, exactly (shorter ones leave the mixture); or `never`."""

    def __post_init__(self) -> None:
        _check_choice("weigh_by", self.weigh_by, _WEIGH_BY)
        _check_choice("stop", self.stop, _STOP)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackConfig:
    """How samples are packed into rows."""

    pack_size: int
    """Tokens in a row."""
    packing_ratio: float = 1.0
    """Share of the row that is planned full; below 1 leaves room for lengths that were estimated too low."""
    vision_size: int | None = None
    """Vision tokens that a row may hold at most."""
    long_samples: str = "drop"
    """What happens to samples above `pack_size`: `drop`, `truncate` or `raise`. Those above `vision_size` cannot be
    truncated and are dropped then."""
    alignment: int = 1
    """Each sample is padded to a multiple of this (context parallelism wants 2 x its size)."""

    def __post_init__(self) -> None:
        if self.pack_size < 1 or self.alignment < 1 or self.pack_size % self.alignment:
            raise ConfigError(
                f"pack_size={self.pack_size} with alignment={self.alignment} gives rows that cannot be cut evenly. "
                f"Give a pack_size that is a positive multiple of the alignment."
            )
        if not 0 < self.packing_ratio <= 1:  # NaN neither
            raise ConfigError(
                f"packing_ratio={self.packing_ratio} is no share of a row that samples can fill. Give a ratio above 0, "
                f"at most 1."
            )
        if self.capacity < 1:
            raise ConfigError(
                f"packing_ratio={self.packing_ratio} leaves a capacity of {self.capacity} tokens in a row of "
                f"{self.pack_size}; nothing fits. Give a greater ratio."
            )
        _check_choice("long_samples", self.long_samples, _LONG)
        _check_least(self, "vision_size")

    @property
    def capacity(self) -> int:
        """Return the tokens that a pack of several samples may hold."""
        return int(self.pack_size * self.packing_ratio) // self.alignment * self.alignment


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainConfig:
    """Single samples in the order of the mixture."""

    max_tokens: int | None = None  # longest sample that is delivered
    long_samples: str = "drop"  # what happens to longer ones: `drop`, `truncate` or `raise`

    def __post_init__(self) -> None:
        _check_choice("long_samples", self.long_samples, _LONG)
        _check_least(self, "max_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConfig:
    """Samples sorted by length inside each window."""

    token_budget: int | None = None
    """Rows x longest row of a group at most; None: group by count, and the batch size decides."""
    max_tokens: int | None = None
    """Longest sample that is delivered; with a budget, the budget by default."""
    long_samples: str = "drop"
    """What happens to longer ones: `drop`, `truncate` or `raise`."""

    def __post_init__(self) -> None:
        _check_choice("long_samples", self.long_samples, _LONG)
        _check_least(self, "token_budget", "max_tokens")
        if self.token_budget is not None:
            limit = self.token_budget if self.max_tokens is None else min(self.max_tokens, self.token_budget)
            object.__setattr__(self, "max_tokens", limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostConfig:
    """`llm = a1 * tokens + a2 * tokens^2` for each document, `vit = b1 * patches + b2 * patches^2` for each image.

    Only ratios matter. The defaults are those of a 7B model with a 0.7B vision tower, both trained.
    """

    llm_linear: float = 1.0
    llm_square: float = 1.4e-5
    vit_linear: float = 0.09
    vit_square: float = 1.5e-6

    def __post_init__(self) -> None:
        values = (self.llm_linear, self.llm_square, self.vit_linear, self.vit_square)
        if any(not np.isfinite(v) or v < 0 for v in values) or not any(values):
            raise ConfigError(
                f"Cost coefficients {values} cannot be balanced: they must be finite, at least 0, and not all 0. "
                f"Leave them out for the defaults or derive them with costs_of_model()."
            )

    @property
    def scale(self) -> float:
        """Return what turns a cost into whole numbers."""
        lead = next(v for v in (self.llm_linear, self.vit_linear, self.llm_square, self.vit_square) if v > 0)
        return _UNITS_PER_TOKEN / lead


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceConfig:
    """How units are assigned to ranks. It never changes the unit stream, only who gets what within a step."""

    barrier: str = "step"
    """Where ranks wait for each other: once a `step` (DDP with accumulation), at every `micro`-step (FSDP), or `none`:
    assign in the order of the stream."""
    horizon: int = 1
    """Steps that are assigned together: more of them even out ranks that have one micro-batch a step, and make steps
    differ from each other."""
    costs: CostConfig = field(default_factory=CostConfig)

    def __post_init__(self) -> None:
        _check_choice("barrier", self.barrier, _BARRIERS)
        _check_least(self, "horizon")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """What decides the unit stream and how it is assigned to ranks."""

    seed: int = 0
    window: int = 4096
    """Samples that are drawn together and cut into units together."""
    shuffle: bool = True
    """Permute shards, samples and units; without it they come as they lie in the tars, units by their first sample."""
    epochs: int | None = 1
    """Epochs after which the stream ends; None streams on. Epochs follow each other without a seam: a window may hold
    the end of one and the beginning of the next, and only the very last step is filled up."""
    mode: PackConfig | GroupConfig | PlainConfig = field(default_factory=PlainConfig)
    order: OrderConfig = field(default_factory=OrderConfig)
    mixture: MixtureConfig = field(default_factory=MixtureConfig)
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    geometry: str = ""
    """Fingerprint of whatever turned media into tokens; a state with another one is refused."""
    text: str = ""
    """Fingerprint of tokenizer and chat template; a state with another one is refused. Empty: not known."""

    def __post_init__(self) -> None:
        _check_least(self, "window", "epochs")

    @property
    def row_policy(self) -> RowPolicy:
        """Return which units may share a micro-batch."""
        if isinstance(self.mode, PlainConfig):
            return "stream"
        return "sorted" if isinstance(self.mode, GroupConfig) and self.mode.token_budget is None else "free"

    def stream_fields(self) -> dict[str, Any]:
        """Return what the unit stream depends on, besides the data, the mixture and the geometry, as flat JSON.

        Settings that are None are left out.
        """
        modes = {PackConfig: "pack", GroupConfig: "group", PlainConfig: "plain"}
        values: dict[str, Any] = {
            "seed": self.seed,
            "window": self.window,
            "shuffle": self.shuffle,
            "mode": modes[type(self.mode)],
        }
        for part in ("mode", "order"):
            values.update({f"{part}.{name}": value for name, value in asdict(getattr(self, part)).items()})
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """How steps are cut from the unit stream: the only place that knows the world size. May change at any resume."""

    world_size: int = 1
    micro_batches: int = 1  # micro-batches that each rank accumulates in one step
    batch_size: int = 1  # units in one micro-batch: packs as rows, or single samples

    def __post_init__(self) -> None:
        _check_least(self, "world_size", "micro_batches", "batch_size")

    @property
    def units_per_step(self) -> int:
        """Return how many units all ranks together consume in one step."""
        return self.world_size * self.micro_batches * self.batch_size


def _check_least(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value} leaves nothing to deliver. Give 1 or more.")


def _check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}={value!r} means nothing: {nearest_name(str(value), allowed)}")


def take_rows(splits: Ints, rows: Ints) -> tuple[Ints, Ints]:
    """Return the entries of some rows of a ragged array, row after row, and the splits of these.

    Row r owns the entries `splits[r]:splits[r + 1]`.

    >>> take_rows(np.array([0, 2, 3, 6]), np.array([2, 0]))
    (array([3, 4, 5, 0, 1]), array([0, 3, 5]))
    """
    begins = splits[rows]
    sizes = splits[rows + 1] - begins
    taken = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(sizes, out=taken[1:])
    return np.arange(taken[-1]) + np.repeat(begins - taken[:-1], sizes), taken
