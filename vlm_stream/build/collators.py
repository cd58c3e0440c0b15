"""How rows of encoded samples become a batch: packed, padded, in NeMo Automodel's forms, or by a user's function.

Enters: rows of encoded samples; the family says which keys they need, the options which form. `auto` gives what
`model(**batch, use_cache=False)` of a transformers model takes: labels that are not shifted (the model's loss does
that, once), positions that restart with each packed document, media joined in row order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch

from vlm_stream.collate import (
    PositionRule,
    build_hf_pack,
    count_media,
    family_of,
    find_family,
    join_hf_packs,
    length_table,
    media_of,
    merge_media,
    neat_packed_vlm_collater,
    pack_row,
    packed_sequence_thd_vlm_collater,
    pad_collate_fn,
    pad_id_of,
    pad_rows,
    stack_positions,
)
from vlm_stream.errors import ConfigError
from vlm_stream.keys import IGNORE, MEDIA_KEYS, PIXEL_KEYS, PIXEL_SPEC_KEY
from vlm_stream.pixels import carry_spec
from vlm_stream.pp_media import prepare_vlm_media_for_pp

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vlm_stream.collate import Family, Positions
    from vlm_stream.options import CollateFn, StreamOptions

    Row = Sequence[dict[str, Any]]
    Joined = tuple[Sequence[dict[str, Any]], dict[str, Any]]

_PACKED_FORMS: Final = ("neat", "thd")


def choose_family(processor: Any, options: StreamOptions) -> Family:
    """Return the family whose steps and keys the batches of a run follow.

    Raises:
        ConfigError: The family is not known, or cannot have the form that the options ask for.
    """
    collate = options.collate
    form = "a function" if callable(collate) else collate
    if form in ("auto", "neat", "thd", "a function"):
        family = family_of(processor, encodes=form != "auto")
    else:
        family = find_family(form)
    who = f"{type(processor).__name__} (family {family.name!r})"
    if form in _PACKED_FORMS and options.mode != "packed":
        raise ConfigError(
            f"collate={form!r} joins the documents of packed rows, but mode is {options.mode!r}, so {who} has one "
            f"sample a row; use mode='packed' with a pack_size, or collate='auto'"
        )
    if options.mode == "packed" and form != "a function" and (family.no_packing or family.only_function):
        why = family.no_packing or "its registered function takes conversations, and makes the rows itself"
        raise ConfigError(f"{who} cannot be packed: {why}; use mode='grouped' or mode='plain'")
    if family.only_function and options.pixels not in ("full", True):
        raise ConfigError(
            f"the registered function of {who} is given the media themselves, so pixels={options.pixels!r} cannot be "
            f"honoured; leave pixels out"
        )
    if form != "neat" and options.attention == "indexed":
        raise ConfigError(
            f"attention='indexed' is a mask of document numbers, which collate='neat' writes and collate={form!r} does "
            f"not; use collate='neat', or another attention"
        )
    if form == "thd" and options.attention != "positions":
        raise ConfigError(
            f"collate='thd' tells documents apart by their lengths and has no mask, but attention is "
            f"{options.attention!r}; leave attention out, or use collate='neat'"
        )
    return family


class RowCollator:
    """Joins encoded rows in the form that the options ask for."""

    is_ours = True
    """What it raises can be the fault of a sample; not so for a function of the user's."""

    def __init__(self, processor: Any, options: StreamOptions, family: Family) -> None:
        """Read the padding token and the family's position rule from the processor.

        Rows that are not packed need positions only where the model cannot follow its own rule: stages of a pipeline
        behind the first have no grids; and of a hidden fake image models skip the tokens but not the grid, and so give
        it to the next row.
        """
        is_packed = options.mode == "packed"
        self.capacity = options.pack_size if is_packed else None
        """Tokens that one row may hold; None: any number."""
        self._processor, self._options, self._family = processor, options, family
        self._padding_idx = pad_id_of(processor)
        self._for_pipeline = options.pp_microbatches is not None
        self._hf_labels = bool(options.hf_labels) and not family.shifted
        is_named = options.collate not in ("auto", *_PACKED_FORMS)
        if is_packed:
            forms = {"neat": self._join_neat, "thd": self._join_thd}
            self._join = forms.get(str(options.collate), self._join_hf)
        elif is_named:
            self._join = self._join_named
        else:
            self._join = self._join_padded if self._hf_labels else self._join_shifted
        needs_positions = is_packed or ((self._hf_labels or is_named) and (self._for_pipeline or options.fake_image))
        self._positions = _position_rule(processor, options) if needs_positions else None

    def __call__(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Return the batch with the family's keys, its media cut for a pipeline if they are to be."""
        units, batch = self._join(rows)
        if self._hf_labels and not (batch["labels"] != IGNORE).any():
            # transformers would divide by no labels and return NaN. Where the labels of the whole step are known, these
            # take the place of the 1 (see `delivery.py`).
            batch["num_items_in_batch"] = torch.ones((), dtype=torch.long)
        if self._options.pp_microbatches is not None:
            owned = _other_media(units) if self._options.pixels else {}
            prepare_vlm_media_for_pp(batch, len(batch["input_ids"]), self._options.pp_microbatches, owned=owned)
        return batch

    def _finish(self, batch: dict[str, Any]) -> dict[str, Any]:
        return batch if self._family.finish is None else self._family.finish(batch, self._processor)

    def _join_hf(self, rows: Sequence[Row]) -> Joined:
        """Several samples a row, as documents that do not see each other."""
        options = self._options
        packs = [
            build_hf_pack(
                row,
                padding_idx=self._padding_idx,
                positions=self._positions,
                hf_labels=self._hf_labels,
                attention=options.attention,
            )
            for row in rows
        ]
        pad_to = options.pack_size if options.pad_rows else None
        batch = join_hf_packs(packs, padding_idx=self._padding_idx, pad_to=pad_to, media_counts=self._for_pipeline)
        return packs, self._finish(batch)

    def _join_neat(self, rows: Sequence[Row]) -> Joined:
        """NeMo Automodel's packed form, with a mask of document numbers or a 4-D one."""
        options, packs = self._options, [self._pack(row) for row in rows]
        batch = neat_packed_vlm_collater(
            packs,
            self._padding_idx,
            options.pack_size if options.pad_rows else None,
            attn_implementation=options.attention,
            materialize_4d_mask=options.attention != "indexed",
        )
        lengths = {key: length_table([pack[key] for pack in packs], 0) for key in ("seq_lens", "seq_lens_padded")}
        return packs, self._finish(batch | lengths | count_media(packs))

    def _join_thd(self, rows: Sequence[Row]) -> Joined:
        """NeMo Automodel's packed form with the lengths of the documents."""
        options, packs = self._options, [self._pack(row) for row in rows]
        length = options.pack_size if options.pad_rows else None
        batch = packed_sequence_thd_vlm_collater(packs, self._padding_idx, length)
        return packs, self._finish(batch | count_media(packs))

    def _pack(self, row: Row) -> dict[str, Any]:
        size, alignment = self._options.pack_size or 0, self._options.alignment
        return pack_row(row, size, self._padding_idx, self._positions, alignment, shifted=not self._hf_labels)

    def _join_padded(self, rows: Sequence[Row]) -> Joined:
        """One sample a row, padded on the right to the longest."""
        samples = [sample for row in rows for sample in row]
        batch: dict[str, Any] = dict(pad_rows(samples, pad_id=self._padding_idx))
        batch["labels"][:, 0] = IGNORE  # no token comes before it: losses do not learn it, and must not count it
        counts = count_media(samples) if self._for_pipeline else {}
        batch |= stack_positions(samples, self._positions, batch["input_ids"].shape[1]) | counts | merge_media(samples)
        return samples, self._finish(batch)

    def _join_shifted(self, rows: Sequence[Row]) -> Joined:
        samples = [sample for row in rows for sample in row]
        counts = count_media(samples) if self._for_pipeline else {}
        return samples, self._finish(pad_collate_fn(samples, self._processor) | counts)

    def _join_named(self, rows: Sequence[Row]) -> Joined:
        """The batch of the family's own collate function."""
        samples = [sample for row in rows for sample in row]
        batch = self._family.collate_rows(samples, self._processor, shifted=not self._hf_labels)
        if self._hf_labels:
            batch["labels"][:, 0] = IGNORE
        positions = stack_positions(samples, self._positions, batch["input_ids"].shape[1])
        return samples, batch | positions | count_media(samples)


class CustomCollator:
    """A function of the user's, called with the rows and the processor."""

    def __init__(self, function: CollateFn, processor: Any, options: StreamOptions, *, is_ours: bool = False) -> None:
        """Keep the function; a capacity means that rows are packs."""
        self.is_ours = is_ours
        self.capacity = options.pack_size if options.mode == "packed" else None
        self._function, self._processor, self._options = function, processor, options

    def __call__(self, rows: Sequence[Sequence[Any]]) -> dict[str, Any]:
        """Call it: a packed row is a list of samples, any other row a sample."""
        given = rows if self.capacity is not None else [sample for row in rows for sample in row]
        batch = self._function(given, self._processor)
        if not isinstance(batch, dict):
            raise ConfigError(
                f"collate_fn returned {type(batch).__name__}, but a batch is a dict, to which names of samples may be "
                f"added; return one, for instance {{'samples': ...}}"
            )
        if self._options.pixels == "compact" and any(name in batch for name in PIXEL_KEYS):
            batch |= carry_spec(sample for row in rows for sample in row)  # it need not know of compact pixels
        if self._options.pp_microbatches is not None:
            prepare_vlm_media_for_pp(batch, len(batch["input_ids"]), self._options.pp_microbatches)
        return batch


Collator: TypeAlias = RowCollator | CustomCollator
"""Joins rows of encoded samples; every row has at least one sample."""


def make_collator(processor: Any, options: StreamOptions, family: Family) -> Collator:
    """Return the collator that the options ask for."""
    if callable(options.collate):
        return CustomCollator(options.collate, processor, options)
    if family.only_function and family.function is not None:
        return CustomCollator(family.function, processor, options, is_ours=True)
    return RowCollator(processor, options, family)


def _position_rule(processor: Any, options: StreamOptions) -> Positions | None:
    if options.model_config is not None:
        return PositionRule.from_config(options.model_config)
    try:
        return PositionRule.from_processor(processor)
    except ConfigError as error:
        raise ConfigError(f"{error} A stream takes the config as model_config=model.config.") from error


def _other_media(units: Sequence[dict[str, Any]]) -> dict[str, list[int]]:
    """Return how many entries of each further medium (sound, tiles under names of their own) every row has."""
    media = [media_of(unit) for unit in units]
    names = {name for one in media for name in one} - {PIXEL_SPEC_KEY}
    if names & {*PIXEL_KEYS}:  # sizes and masks of other pixels belong to these
        names -= {*MEDIA_KEYS}
    return {name: [len(one.get(name, ())) for one in media] for name in sorted(names)}
