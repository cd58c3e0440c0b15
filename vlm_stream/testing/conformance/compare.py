"""Our own loop, and the comparison with it: what each rank should have been given, and sentences on what differs."""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from vlm_stream.errors import DatasetError
from vlm_stream.loader import StreamLoader
from vlm_stream.testing.conformance.run import Keys, Run, digests
from vlm_stream.testing.models import build_tiny_model

_MOST: Final = 4  # sentences about a rank in one check; the rest is counted
_TOLERANCE: Final = 1e-6
_TENSOR: Final = re.compile(r"^\w+\[[\d, ]*\] [0-9a-f]{16}$")
Name: TypeAlias = tuple[str, str, str]  # of a sample: source, shard, key


@dataclass(frozen=True, slots=True)
class Given:
    """A batch as our own loop gets it."""

    keys: Keys
    samples: tuple[Name, ...]  # none of them: it only fills the last step


Expected: TypeAlias = list[list[Given]]  # batches by rank


def own_loop(run: Run, world: int, state: dict[str, Any] | None = None) -> Expected:
    """Return the batches of each rank to the end of the epoch, from the start or from a state."""
    return [_take_all(_open(run, rank, world), state) for rank in range(world)]


def state_after(run: Run, world: int, num_batches: int) -> dict[str, Any]:
    """Return the state after so many batches of each rank."""
    with _open(run, 0, world) as loader:
        for _ in itertools.islice(loader, num_batches):
            pass
        return loader.state_dict()


def evaluate(run: Run, world: int) -> Expected:
    """Return the batches of one evaluation, by rank."""
    options = {"world_size": world, "with_refs": True, "num_workers": 0}
    return [_take_all(run.eval_loader(rank=rank, **options)) for rank in range(world)]


def _take_all(loader: StreamLoader, state: dict[str, Any] | None = None) -> list[Given]:
    with loader:
        if state is not None:
            loader.load_state_dict(state)
        return [_given(batch) for batch in loader]


def first_gradients(run: Run, want: Expected) -> dict[str, Any]:
    """Return the gradients of the first step of our own loop, computed from one big batch of the same rows.

    Its loss is the model's own mean over all labels: no accumulation, no ranks, no label counts. In float64, so that
    what differs is the trainer's.
    """
    rows = len(want) * run.accumulation
    with _open(run, 0, 1, micro_batches=1, batch_size=rows) as loader:
        batch = dict(next(iter(loader)))
    own = {name for rank in want for given in rank[: run.accumulation] for name in given.samples}
    if {tuple(name) for row in batch.pop("refs") for name in row} != own:
        raise DatasetError(
            "the first step of the ranks and one batch of the same size hold different samples, so their gradients "
            "cannot be compared; leave `barrier`, `horizon` and the like as they are in `Run.options`"
        )
    batch.pop("num_items_in_batch", None)
    batch = {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}
    model = build_tiny_model("qwen2_5_vl", run.processor()).double()
    model(**batch, use_cache=False).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _open(run: Run, rank: int, world: int, **changes: Any) -> StreamLoader:
    return run.loader(rank=rank, world_size=world, with_refs=True, num_workers=0, **changes)


def _given(batch: dict[str, Any]) -> Given:
    names = [tuple(name) for row in batch["refs"] for name in row]
    return Given(digests({key: value for key, value in batch.items() if key != "refs"}), tuple(names))


class ConformanceError(AssertionError):
    """A trainer trained on something else than our own loop would have."""


def compare_batches(got: Mapping[int, list[Keys]], want: Expected, *, first: int = 0, whole: bool) -> list[str]:
    """Compare the batches of each rank on every key, with those of our own loop from the batch `first` on.

    A `whole` run had to go on to the end.
    """
    problems = []
    for rank, given in enumerate(want):
        mine, rest = got.get(rank, []), given[first:]
        found = [
            f"rank {rank}, batch {first + place}, {difference}"
            for place, (keys, right) in enumerate(zip(mine, rest, strict=False))
            for difference in _compare_keys(keys, right.keys, want)
        ]
        problems += _shorten(found)
        if len(mine) > len(rest):
            problems.append(f"rank {rank}: {len(mine) - len(rest)} batches more than the {len(rest)} of our own loop")
        if whole and len(mine) < len(rest):
            problems.append(
                f"rank {rank}: {len(mine)} batches, expected {len(rest)} (from batch {first} to the end of the epoch)"
            )
    for rank in sorted(set(got) - set(range(len(want)))):
        problems.append(f"rank {rank} trained, but there are {len(want)} ranks")
    return problems


def compare_ranks(got: Mapping[int, list[Keys]], want: Expected, samples: set[Name]) -> list[str]:
    """Tell samples that several ranks (or one of them twice) trained on, and those of the epoch that nobody did.

    `got` are all batches that counted: from the start to the save, and from the resume to the end. Our own loop says
    which samples are in a batch.
    """
    known = {_identity(given.keys): given for rank in want for given in rank}
    seen: dict[Name, list[int]] = {}
    problems = []
    for rank, batches in sorted(got.items()):
        for place, keys in enumerate(batches):
            given = known.get(_identity(keys))
            if given is None:
                problems.append(f"rank {rank}, batch {place}: its samples are not known, it is none of our batches")
                continue
            for name in given.samples:
                seen.setdefault(name, []).append(rank)
    twice = {name: ranks for name, ranks in seen.items() if len(ranks) > 1}
    if twice:
        name, ranks = next(iter(sorted(twice.items())))
        problems.append(
            f"{len(twice)} of {len(samples)} samples are trained on more than once: {name} by ranks {ranks}"
        )
    lost = sorted(samples - set(seen))
    if lost:
        problems.append(f"{len(lost)} of {len(samples)} samples are never trained on: {lost[0]} and so on")
    return _shorten(problems)


def compare_evaluations(got: Mapping[int, list[Keys]], want: Expected, num_evaluations: int) -> list[str]:
    """Compare each of the evaluations with the batches of one."""
    problems = []
    for rank, given in enumerate(want):
        mine = got.get(rank, [])
        if len(mine) != num_evaluations * len(given):
            problems.append(
                f"rank {rank}: {len(mine)} batches in eval mode, expected {num_evaluations} evaluations of {len(given)}"
            )
        found = []
        for place, keys in enumerate(mine[: num_evaluations * len(given)]):
            number, index = divmod(place, len(given))
            found += [
                f"rank {rank}, evaluation {number}, batch {index}, {difference}"
                for difference in _compare_keys(_without_counts(keys), _without_counts(given[index].keys), want)
            ]
        problems += _shorten(found)
    return problems


def compare_numbers(
    told: Mapping[int, Mapping[str, float | None]],
    rates: Mapping[int, Sequence[float]],
    *,
    expected: Mapping[str, float],
    schedule: Sequence[float],
    whole: bool,
) -> list[str]:
    """Compare what the trainer told, and the learning rates of its steps.

    A run that was killed (not `whole`) may have told nothing yet, and may lack the last step on some ranks.
    """
    problems = []
    for name, value in expected.items():
        if whole and not any(name in facts for facts in told.values()):
            problems.append(f"{name} was not told: call run.tell({name}=...) with the number that the trainer uses")
        problems += [
            f"rank {rank}: {name} is {facts[name]}, expected {value}"
            for rank, facts in sorted(told.items())
            if name in facts and facts[name] != value
        ]
    for rank, mine in sorted(rates.items()):
        if len(mine) not in (len(schedule), len(schedule) - (not whole)):
            problems.append(f"rank {rank}: {len(mine)} optimizer steps, expected {len(schedule)}")
        for place, (rate, right) in enumerate(zip(mine, schedule, strict=False)):
            if abs(rate - right) > _TOLERANCE * max(schedule):
                problems.append(
                    f"rank {rank}, step {place} of this run: learning rate {rate:.4g}, expected {right:.4g}"
                )
                break
    if not rates:
        problems.append("no optimizer step was seen")
    return _shorten(problems)


def compare_gradients(got: Mapping[int, Mapping[str, Any]], want: Mapping[str, Any]) -> list[str]:
    """Compare the gradients of the first step with those of one big batch, relative to the largest of them."""
    problems = [] if got else ["no optimizer step was seen, so there are no gradients"]
    largest = max(_largest(gradient) for gradient in want.values())
    for rank, mine in sorted(got.items()):
        missing = sorted(set(want) - set(mine))
        if missing:
            problems.append(f"rank {rank}: {len(missing)} of {len(want)} parameters have no gradient: {missing[0]}")
        off = {name: _largest(mine[name].double() - want[name]) / largest for name in want if name in mine}
        worst = max(off, key=lambda name: off[name], default="")
        if worst and off[worst] > _TOLERANCE:
            factor = float((mine[worst].double() * want[worst]).sum() / (want[worst] ** 2).sum())
            problems.append(
                f"rank {rank}: gradients differ from those of one big batch by {off[worst]:.1e} of the largest "
                f"(allowed: {_TOLERANCE:.0e}), most in {worst}, where they are about {factor:.4f} times the right. "
                f"Loss is sum / num_items_in_batch, times the number of ranks where gradients are averaged over them, "
                f"without division by micro-batches, without clipping; and the model wants use_cache=False"
            )
    return _shorten(problems)


def _largest(values: Any) -> float:
    """Return the largest magnitude; infinite where something is not a number."""
    return float(values.abs().nan_to_num(nan=float("inf")).max())


def _identity(keys: Keys) -> tuple[str | None, ...]:
    return keys.get("input_ids"), keys.get("pixel_values"), keys.get("labels")


def _without_counts(keys: Keys) -> Keys:
    return {key: value for key, value in keys.items() if key != "num_items_in_batch"}


def _compare_keys(got: Keys, want: Keys, all_given: Expected) -> list[str]:
    if got == want:
        return []
    if got.get("input_ids") != want["input_ids"]:
        return [f"key input_ids: {_name_batch(got, all_given)}"]
    problems = []
    for key, value in want.items():
        if key not in got and key != "num_items_in_batch":  # the gradients show whether it was used
            problems.append(f"key {key}: missing, expected {value}")
        elif key in got and got[key] != value:
            problems.append(f"key {key}: {got[key]}, expected {value}")
    problems += [
        f"key {key}: {value}, which is not in the batch of our own loop"
        for key, value in got.items()
        if key not in want and _TENSOR.match(value)
    ]
    return problems


def _name_batch(got: Keys, all_given: Expected) -> str:
    for rank, batches in enumerate(all_given):
        for place, given in enumerate(batches):
            if given.samples and given.keys["input_ids"] == got.get("input_ids"):
                return f"this is batch {place} of rank {rank}"
    if "input_ids" not in got:
        return "missing"
    return f"{got['input_ids']} is in none of our batches"


def _shorten(problems: list[str]) -> list[str]:
    if len(problems) <= _MOST:
        return problems
    return [*problems[:_MOST], f"and {len(problems) - _MOST} more differences"]
