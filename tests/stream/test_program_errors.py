"""What is wrong with the program, and not with a sample, still ends a run; what is wrong with a sample does not."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vlm_stream import StreamLoader
from vlm_stream.build.rows import RowBuilder
from vlm_stream.encode import Encoder
from vlm_stream.errors import BadBudgetError, ConfigError

PACKED = {"pack_size": 1024, "with_refs": True}


def changed(processor: Any, call: Any) -> Any:
    """Return a copy of the processor whose calls go through `call(original, text, arguments)`."""

    def through(self: Any, **arguments: Any) -> Any:
        return call(lambda: base.__call__(self, **arguments), arguments["text"][0], arguments)

    base = type(processor)
    copied = copy.copy(processor)
    copied.__class__ = type(base.__name__, (base,), {"__call__": through})
    return copied


def boom(rows, processor):
    raise TypeError("the user's own mistake")


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("given", ["processor", None])
def test_an_error_of_the_users_collate_function_ends_the_run(toy_shards, processor, num_workers, given):
    used = processor if given else None
    loader = StreamLoader(toy_shards, processor=used, collate_fn=boom, num_workers=num_workers, **PACKED)
    with pytest.raises(TypeError, match="the user's own mistake"):
        list(loader)
    assert loader.ledger.num_bad == 0


# By their classes: an error that is raised keeps what it was raised from, which here is the loader.
@pytest.mark.parametrize("error", [ImportError, ModuleNotFoundError, ConfigError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_of_the_program_ends_the_run(toy_shards, processor, error, num_workers):
    def fail(original, text, arguments):
        raise error("not the fault of a sample")

    loader = StreamLoader(
        toy_shards, processor=changed(processor, fail), num_workers=num_workers, start_method="fork", **PACKED
    )
    with pytest.raises(error):
        list(loader)
    assert loader.ledger.num_bad == 0


def test_a_processor_that_encodes_nothing_ends_the_run_at_once(toy_shards, processor):
    def fail(original, text, arguments):
        raise RuntimeError("the processor is broken")

    loader = StreamLoader(toy_shards, processor=changed(processor, fail), **PACKED)
    with pytest.raises(ConfigError, match=r"cannot encode one short turn.*RuntimeError: the processor is broken.*Look"):
        list(loader)


def test_a_processor_that_fails_on_all_media_ends_the_run_by_the_budget(toy_shards, processor):
    def fail(original, text, arguments):
        if arguments.keys() & {"images", "videos"}:
            raise AttributeError("no pixels today")
        return original()

    loader = StreamLoader(toy_shards, processor=changed(processor, fail), **PACKED)
    expected = (
        r"(?s)samples were bad, more than the budget of 1.00%.*look at the processor first.*The reasons:\s+\d+ x "
        r"encode: processor_error.*The newest:.*refused the sample \(AttributeError: no pixels today\)"
    )
    with pytest.raises(BadBudgetError, match=expected):
        list(loader)


class StrangeError(Exception):
    """Of a library that nobody knows."""


@pytest.mark.parametrize("raised", [MemoryError, RecursionError, StrangeError, KeyError])
def test_one_sample_that_makes_a_processor_raise_is_a_hole(toy_shards, processor, raised):
    seen = []

    def fail(original, text, arguments):
        if len(seen) < 3 and "images" in arguments:
            seen.append(text)
            raise raised("x" * 5000)
        return original()

    loader = StreamLoader(toy_shards, processor=changed(processor, fail), bad_budget=None, **PACKED)
    keys = [name[2] for batch in loader for row in batch["refs"] for name in row]
    bad = list(loader.ledger.newest)
    assert len(keys) == len(set(keys)) == 60 - len(bad) < 60
    assert {line.reason for line in bad} == {"processor_error"}
    assert all(raised.__name__ in line.detail and len(line.detail) < 500 for line in bad)


def test_a_sample_that_cannot_be_collated_is_a_hole(toy_shards, processor):
    whole = StreamLoader(toy_shards, processor=processor, mode="plain", batch_size=4, with_refs=True)
    expected = [batch["refs"] for batch in whole]

    def lengthen(original, text, arguments):
        batch = original()
        if "images" in arguments and len(arguments["images"][0]) == 3:
            batch["mm_token_type_ids"] = torch.zeros(1, 5, dtype=torch.long)
        return batch

    strange = changed(processor, lengthen)
    loader = StreamLoader(toy_shards, processor=strange, mode="plain", batch_size=4, with_refs=True, bad_budget=None)
    batches = list(loader)
    left_out = {line.sample for line in loader.ledger.newest}
    assert 0 < len(left_out) == loader.ledger.num_bad < 10
    assert loader.ledger.by_reason() == {"encode: not_collated": len(left_out)}
    assert all("RuntimeError" in line.detail for line in loader.ledger.newest)
    assert all(len(batch["input_ids"]) == 4 for batch in batches)
    kept = [[[name for name in row if name[2] not in left_out] for row in refs] for refs in expected]
    assert [batch["refs"] for batch in batches] == kept


class Fussy:
    """A collator that cannot take some samples, or some number of them."""

    capacity = None

    def __init__(self, refuses, is_ours=True):
        self.refuses, self.is_ours = refuses, is_ours

    def __call__(self, rows):
        samples = [sample for row in rows for sample in row]
        if self.refuses(samples):
            raise ValueError("these do not go together")
        return {"lengths": [len(sample["input_ids"]) for sample in samples]}


def rows_of(*lengths):
    return [[{"input_ids": torch.zeros(length)}] for length in lengths]


def build(processor, refuses, **options):
    return RowBuilder(Encoder(processor), Fussy(refuses, **options))


def test_only_samples_that_fail_alone_are_left_out(processor):
    builder = build(processor, lambda samples: any(len(sample["input_ids"]) == 3 for sample in samples))
    batch, bad = builder.collate(rows_of(100, 3, 101, 3))
    filler = SimpleNamespace(length=batch["lengths"][1])
    assert batch["lengths"] == [100, filler.length, 101, filler.length]
    assert [(row, position, error.reason) for row, position, error in bad] == [
        (1, 0, "not_collated"),
        (3, 0, "not_collated"),
    ]
    assert "its tensors cannot be put into a batch (ValueError: these do not go together)" in str(bad[0][2])


@pytest.mark.parametrize(
    ("refuses", "options"),
    [
        (lambda samples: sum(len(sample["input_ids"]) >= 100 for sample in samples) > 1, {}),  # only together
        (lambda samples: True, {}),  # fillers, too
        (lambda samples: any(len(sample["input_ids"]) == 3 for sample in samples), {"is_ours": False}),
    ],
)
def test_a_collation_that_fails_for_no_single_sample_is_an_error(processor, refuses, options):
    with pytest.raises(ValueError, match="these do not go together"):
        build(processor, refuses, **options).collate(rows_of(100, 3, 101))
