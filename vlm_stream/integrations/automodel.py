"""NeMo Automodel's VLM recipes: a `_target_` for the `dataset:` section of their YAML.

    dataset:
      _target_: vlm_stream.integrations.automodel.StreamDataset
      sources: shards/
      processor: Qwen/Qwen2.5-VL-3B-Instruct
      options: {pack_size: 4096, num_workers: 4}

The recipe builds its own `StatefulDataLoader` with a sampler over a dataset that must have a length and be asked by
index. So the dataset here is as long as the epoch in rows, and whatever rows it is asked for, it hands out the next
batch of the stream whole: in the order of the plan, read by the stream's own workers. Its state is in the state of the
recipe's loader, and so in every checkpoint of the recipe.

Nothing of `nemo_automodel` is imported: the recipe's side is met by the names and forms that it looks for. Batches
have the names, shapes and types of its own packed and padded collation (`PackedRows`, `PaddedRows`): labels shifted,
documents numbered, pixels in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal, TypeAlias, get_args

from torch.utils.data import get_worker_info

from vlm_stream.collate import (
    PackingContract,
    PositionRule,
    Positions,
    neat_packed_vlm_collater,
    pack_row,
    packed_sequence_thd_vlm_collater,
    pad_collate_fn,
    pad_id_of,
    stack_positions,
)
from vlm_stream.errors import ConfigError, StateError, nearest_name
from vlm_stream.loader import StreamLoader

__all__ = ["StreamBatches", "StreamDataset"]

PackedAs: TypeAlias = Literal["block_causal", "document_ids", "flash_varlen", "thd"]
_FORMS: Final = get_args(PackedAs)
_OWN_NAMES: Final = (
    "sources",
    "processor",
    "options",
    "batch_size",
    "collate_fn",
    "hf_labels",
    "rank",
    "world_size",
    "device_mesh",
    "device",
    "dtype",
)
"""Of `StreamLoader`: what the recipe says, or another field of the dataset."""


@dataclass(kw_only=True)
class StreamDataset:
    """The `dataset:` (and `validation_dataset:`) of a VLM recipe: what `_target_` names.

    Args:
        sources: As for `StreamLoader`.
        processor: The name or path of the model's processor.
        local_batch_size: That of `step_scheduler`: rows in a batch.
        global_batch_size: That of `step_scheduler`: rows of an optimizer step over all ranks. The plan then knows which
            batches are accumulated, balances them together and fills the last step. None: every batch is a step.
        packed_as: How documents of a packed row are told apart. `block_causal`: a bool mask `[B, 1, S, S]` (SDPA and
            eager attention); `flash_varlen`: cumulative lengths for transformers' flash attention; `document_ids`: a
            mask of document numbers, for models of the recipe's that want them; `thd`: lengths for Transformer Engine.
        sequence_metadata: Add `packed_token_indices`, `cu_seqlens` and `max_seqlen`, which the recipe's models with
            recurrent layers want.
        options: Any other keyword of `StreamLoader`.
    """

    sources: Any
    processor: Any
    local_batch_size: int = 1
    global_batch_size: int | None = None
    packed_as: PackedAs = "block_causal"
    sequence_metadata: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    builds_with_data_parallel_rank: ClassVar[bool] = True
    """By this the recipe knows that `build` wants the rank among data-parallel peers."""

    def __post_init__(self) -> None:
        """Refuse what the recipe decides, and what would give batches that its trainer does not take."""
        if self.packed_as not in _FORMS:
            raise ConfigError(f"packed_as is {self.packed_as!r}; {nearest_name(str(self.packed_as), _FORMS)}")
        taken = [name for name in _OWN_NAMES if name in self.options]
        if taken:
            raise ConfigError(
                f"dataset.options has {', '.join(taken)}, which the recipe or another field of dataset says, so two "
                f"answers would contradict each other; leave them out (rows of a batch: dataset.local_batch_size)"
            )
        if self.global_batch_size is not None and "micro_batches" in self.options:
            raise ConfigError(
                "dataset has global_batch_size and options.micro_batches, which both say what an optimizer step is; "
                "give one of them"
            )

    def build(self, *, rank: int, world_size: int) -> StreamBatches:
        """Return the dataset of one data-parallel rank; the recipe calls this."""
        options = dict(self.options)
        if self.global_batch_size is not None:
            options["micro_batches"] = self._micro_batches(world_size)
        if options.get("mode", "packed") == "packed":
            options["collate_fn"] = PackedRows(
                packed_as=self.packed_as,
                pack_size=options.get("pack_size"),
                alignment=options.get("alignment", 1),
                pad_rows=options.get("pad_rows", False),
                model_config=options.get("model_config"),
                sequence_metadata=self.sequence_metadata,
            )
        else:
            options["collate_fn"] = PaddedRows(
                with_positions=options.get("fake_image", False), model_config=options.get("model_config")
            )
        if options.get("epochs", 1) is None or options.get("stop") == "never":
            raise ConfigError(
                "dataset.options says that the stream has no end, and the recipe wants to know how long an epoch is; "
                "leave epochs at 1 and repeat them with step_scheduler.num_epochs"
            )
        loader = StreamLoader(
            self.sources,
            processor=self.processor,
            batch_size=self.local_batch_size,
            rank=rank,
            world_size=world_size,
            **options,
        )
        return StreamBatches(loader, world_size)

    def _micro_batches(self, world_size: int) -> int:
        rows = self.local_batch_size * world_size
        if self.global_batch_size is None or self.global_batch_size % rows:
            raise ConfigError(
                f"global_batch_size {self.global_batch_size} is no multiple of {self.local_batch_size} rows on each of "
                f"{world_size} ranks, so a step cannot be made of whole batches; change one of them"
            )
        return self.global_batch_size // rows


class StreamBatches:
    """A dataset by index, as torch sees it, that hands out the batches of a stream one after the other.

    Its rows have no numbers of their own: which batch comes next is the stream's decision, and how many there are is
    the length of the epoch. It must be asked in the process that trains.
    """

    def __init__(self, loader: StreamLoader, world_size: int) -> None:
        self.loader = loader
        self._rows = loader.options.batch_size
        self._world_size = world_size
        self._num_batches = len(loader)
        self._taken = 0
        """Batches of the recipe's epoch that were handed out."""
        self._taken_of_round = 0
        """Those of the stream's."""
        self._iterator: Iterator[dict[str, Any]] | None = None
        self._first: list[int] | None = None

    def __len__(self) -> int:
        """Return the rows of an epoch over all ranks: the recipe's sampler deals them out."""
        return self._num_batches * self._rows * self._world_size

    def __getitem__(self, index: int) -> Any:
        raise ConfigError(
            "rows were asked for one by one, but this dataset hands out whole batches, packed and tokenised already; "
            "take packed_sequence:, dataset.pretokenize, dataset.packing and dataset.max_length out of the recipe "
            "(dataset.options.pack_size and .max_length say it here)"
        )

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Any]:
        """Return the next batch, whatever rows are asked for."""
        self._check(indices)
        if self._taken == self._num_batches:
            self._taken = 0
        if not self.loader.options.train:
            self._restart_evaluation(list(indices))
        batch = self._next()
        if batch is None:
            self._taken = self._taken_of_round = 0
            raise StopIteration  # the epoch was begun with other ranks, or has fewer batches than the first
        self._taken += 1
        self._taken_of_round += 1
        return {name: value for name, value in batch.items() if name != "num_items_in_batch"}  # the recipe counts

    def robust_collate(self, collate_fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return what the recipe is to use instead of its collation: batches are finished already."""
        return _as_it_is

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the stream, and how far the two epochs are, which may differ in length."""
        return {**self.loader.state_dict(), "taken": self._taken, "taken_of_round": self._taken_of_round}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        missing = {"taken", "taken_of_round"} - set(state)
        if missing:
            raise StateError(
                f"the state of the recipe's dataloader has no {' and '.join(sorted(missing))}, so it was not saved by "
                f"this dataset and says nothing of its position; resume from a checkpoint of a run that had it"
            )
        self.loader.load_state_dict({name: state[name] for name in state if not name.startswith("taken")})
        self._iterator = None
        self._taken, self._taken_of_round = int(state["taken"]), int(state["taken_of_round"])

    def _check(self, indices: Sequence[int]) -> None:
        worker = get_worker_info()
        if worker is not None:
            raise ConfigError(
                f"the recipe's dataloader has num_workers={worker.num_workers}, and each of them would read the whole "
                f"stream; leave dataloader.num_workers at 0 and set dataset.options.num_workers"
            )
        if len(indices) != self._rows:
            raise ConfigError(
                f"the recipe wants {len(indices)} rows a batch (step_scheduler.local_batch_size) and the stream makes "
                f"{self._rows}; set dataset.local_batch_size to the same number"
            )

    def _restart_evaluation(self, indices: list[int]) -> None:
        """Begin again where the recipe does: its sampler asks for the same rows first, every time."""
        if self._first is None or indices == self._first:
            self._first, self._iterator = indices, None
            self._taken = self._taken_of_round = 0

    def _next(self) -> dict[str, Any] | None:
        """Return the next batch, or None where the stream's epoch ends and the recipe's, begun with it, does not."""
        batch = None if self._iterator is None else next(self._iterator, None)
        if batch is None and self._iterator is None:
            self._iterator = iter(self.loader)
            batch = next(self._iterator, None)
        if batch is None and (self._taken == 0 or self._taken != self._taken_of_round):
            self._iterator = iter(self.loader)
            batch = next(self._iterator, None)
            self._taken_of_round = 0
        return batch


def _as_it_is(batch: Any) -> Any:
    return batch


class _Rows:
    """The position rule of a family, read when its processor is known."""

    def __init__(self, model_config: Any) -> None:
        self._model_config = model_config
        self._rules: list[Positions | None] = []

    def _rule(self, processor: Any) -> Positions | None:
        if not self._rules:
            config = self._model_config
            rule = PositionRule.from_processor(processor) if config is None else PositionRule.from_config(config)
            self._rules.append(rule)
        return self._rules[0]


class PaddedRows(_Rows):
    """One sample a row in the form of the recipe's collation: padded, labels shifted, pixels in bfloat16.

    With fake images the rows have positions too: a model would skip the hidden tokens of such an image and give its
    grid to the next row.
    """

    def __init__(self, *, with_positions: bool = False, model_config: Any = None) -> None:
        super().__init__(model_config)
        self._with_positions = with_positions

    def __call__(self, samples: Sequence[Mapping[str, Any]], processor: Any) -> dict[str, Any]:
        batch = pad_collate_fn(samples, processor)
        rule = self._rule(processor) if self._with_positions else None
        return batch | stack_positions(samples, rule, batch["input_ids"].shape[1])


class PackedRows(_Rows):
    """Packed rows in the form of the recipe's own packed collation: called with rows of samples and the processor.

    Labels are shifted within each document; `_packed_seq_ids` numbers the documents of a row; positions restart with
    each of them and have three axes where the family has; pixels are bfloat16.
    """

    def __init__(
        self,
        *,
        packed_as: PackedAs,
        pack_size: int | None,
        alignment: int = 1,
        pad_rows: bool = False,
        model_config: Any = None,
        sequence_metadata: bool = False,
    ) -> None:
        super().__init__(model_config)
        self._form = packed_as
        self._pack_size = pack_size or 0
        self._alignment = alignment
        self._pad_to = pack_size if pad_rows else None
        self._sequence_metadata = sequence_metadata

    def __call__(self, rows: Sequence[Sequence[Mapping[str, Any]]], processor: Any) -> dict[str, Any]:
        pad_id, rule = pad_id_of(processor), self._rule(processor)
        packs = [pack_row(row, self._pack_size, pad_id, rule, self._alignment) for row in rows]
        if self._form == "thd":
            return packed_sequence_thd_vlm_collater(packs, pad_id, self._pad_to)
        contract = PackingContract(self._form, self._sequence_metadata)
        return neat_packed_vlm_collater(packs, pad_id, self._pad_to, packing=contract)
