"""One check per public name of NeMo Automodel: the same inputs through both, every difference found or documented.

A check draws an input by hypothesis and yields `(tag, ours, theirs)`: values, or functions that are called here, so
that an error of one side alone is a difference too. Where the two differ, a decision whose pattern fits the place must
say why; otherwise the check fails, with the smallest input that shows it. A decision that no input shows fails too.
"""

import dataclasses
import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from importlib import import_module
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from PIL import Image

ROOT = "nemo_automodel.components.datasets."
OPEN = "OPEN: "
"""How the text of a decision begins that is none: a defect of ours that is known and not mended."""


@dataclass(frozen=True)
class Check:
    """One public name."""

    module: str
    name: str
    ours: str
    """Where we have it; empty: nowhere."""
    decisions: dict[str, str] = field(default_factory=dict)
    """Pattern of a place in the results -> why it differs there."""
    object: Any = None
    """What `ours` names."""
    inputs: int = 0
    run: Callable[..., Iterator[tuple[str, Any, Any]]] | None = None


@dataclass
class Outcome:
    """What came of it."""

    inputs: int = 0
    shown: Counter = field(default_factory=Counter)
    """Decisions that some input showed."""


CHECKS: dict[tuple[str, str], Check] = {}


def same(module: str, name: str, ours: Any, inputs: int = 40, **decisions: str):
    """Register a check; `decisions` may also come as a mapping under `why`."""
    why = decisions.pop("why", {}) | decisions
    where = ours if isinstance(ours, str) else f"{ours.__module__.rsplit('.', 1)[0]}.{ours.__name__}"

    def register(run):
        for one in name.split():
            CHECKS[module, one] = Check(module, one, where, why, ours, inputs, run)
        return run

    return register


def signature_differences(ours: Any, theirs: Any) -> Iterator[tuple[str, str]]:
    """Yield the parameters of theirs that ours does not take by name, in that place, with that default."""
    if not (callable(ours) and callable(theirs)) or ours.__name__.strip("_") != theirs.__name__.strip("_"):
        return
    own, other = (inspect.signature(one).parameters for one in (ours, theirs))
    takes_any = any(p.kind is p.VAR_KEYWORD for p in own.values())
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    places = [[name for name, p in one.items() if p.kind in kinds] for one in (own, other)]
    for name, parameter in other.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            if not takes_any:
                yield f"signature.{name}", "no **kwargs"
        elif name not in own:
            if not takes_any:
                yield f"signature.{name}", f"no parameter {name}"
        elif name in places[1] and name not in places[0][: 1 + places[1].index(name)]:
            yield f"signature.{name}", f"{places[0]} against {places[1]}"
        elif not _same_default(own[name].default, parameter.default):
            yield f"signature.{name}", f"{name}={own[name].default} against {parameter.default}"


def _same_default(ours: Any, theirs: Any) -> bool:
    plain = (type(None), bool, int, float, str, tuple, type)
    are_plain = isinstance(ours, plain), isinstance(theirs, plain)
    return ours == theirs if all(are_plain) else not any(are_plain)


def missing(module: str, name: str, why: str) -> None:
    CHECKS[module, name] = Check(module, name, "", {"": why})


class UnequalError(AssertionError):
    """A difference that no decision covers."""


def run_check(check: Check) -> Outcome:
    """Compare on `check.inputs` inputs; raise `UnequalError` for the smallest that differs without a decision."""
    out = Outcome()

    @settings(
        max_examples=check.inputs,
        deadline=None,
        database=None,
        derandomize=True,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def law(data):
        out.inputs += 1
        for tag, ours, theirs in check.run(data.draw):
            for place, text in differences(tag, outcome(ours), outcome(theirs)):
                pattern = next((p for p in check.decisions if fnmatch(place, p)), None)
                if pattern is None:
                    raise UnequalError(f"{check.module}.{check.name} differs at {place}: {text}")
                out.shown[pattern] += 1

    home = import_module(ROOT + check.module)
    held = getattr(home, check.name, None)
    for place, text in signature_differences(check.object, held):
        pattern = next((p for p in check.decisions if fnmatch(place, p)), None)
        if pattern is None:
            raise UnequalError(f"{check.module}.{check.name} is called differently: {text}")
        out.shown[pattern] += 1
    logging.disable(logging.CRITICAL)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small tensors
    try:
        law()
    finally:
        logging.disable(logging.NOTSET)
        torch.set_num_threads(threads)
    stale = {pattern for pattern, why in check.decisions.items() if not why.startswith(OPEN)} - set(out.shown)
    if stale:
        raise UnequalError(f"{check.module}.{check.name}: no input shows the documented difference at {sorted(stale)}")
    return out


@dataclass(frozen=True)
class Raised:
    """An error in place of a value; two errors are equal, whatever they say."""

    error: Exception

    def __str__(self):
        return f"{type(self.error).__name__}: {self.error}"


def outcome(value: Any) -> Any:
    if not inspect.isfunction(value):
        return value
    try:
        return value()
    except Exception as error:
        return Raised(error)


def differences(place: str, ours: Any, theirs: Any) -> Iterator[tuple[str, str]]:
    """Yield where two results differ, by keys and positions joined with dots, and how."""
    if isinstance(ours, Raised) or isinstance(theirs, Raised):
        if not (isinstance(ours, Raised) and isinstance(theirs, Raised)):
            yield f"{place}.error", f"{short(ours)} against {short(theirs)}"
    elif isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        for key in sorted(set(ours) | set(theirs), key=str):
            if key not in ours or key not in theirs:
                side = "ours" if key in ours else "theirs"
                yield f"{place}.{key}.only_{side}", f"{short(ours.get(key))} against {short(theirs.get(key))}"
            else:
                yield from differences(f"{place}.{key}", ours[key], theirs[key])
    elif isinstance(ours, (torch.Tensor, np.ndarray)) or isinstance(theirs, (torch.Tensor, np.ndarray)):
        yield from _tensors(place, ours, theirs)
    elif isinstance(ours, Image.Image) and isinstance(theirs, Image.Image):
        yield from _tensors(place, np.asarray(ours), np.asarray(theirs))
    elif _is_list(ours) and _is_list(theirs):
        if len(ours) != len(theirs):
            yield f"{place}.length", f"{len(ours)} against {len(theirs)}: {short(ours)} against {short(theirs)}"
        else:
            for number, pair in enumerate(zip(ours, theirs, strict=True)):
                yield from differences(f"{place}.{number}", *pair)
    elif dataclasses.is_dataclass(ours) and dataclasses.is_dataclass(theirs):
        yield from differences(place, fields_of(ours), fields_of(theirs))
    elif ours != theirs or type(ours) is not type(theirs):
        yield place, f"{short(ours)} against {short(theirs)}"


def fields_of(value: Any) -> dict[str, Any]:
    return {entry.name: getattr(value, entry.name) for entry in dataclasses.fields(value)}


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _tensors(place, ours, theirs):
    if type(ours) is not type(theirs):
        yield f"{place}.type", f"{short(ours)} against {short(theirs)}"
        return
    if ours.dtype != theirs.dtype:
        yield f"{place}.dtype", f"{ours.dtype} against {theirs.dtype}"
    if ours.shape != theirs.shape:
        yield f"{place}.shape", f"{list(ours.shape)} against {list(theirs.shape)}"
    elif not bool((torch.as_tensor(ours).double() == torch.as_tensor(theirs).double()).all()):
        yield f"{place}.values", f"{short(ours)} against {short(theirs)}"


def short(value: Any) -> str:
    text = " ".join(str(value.tolist() if isinstance(value, torch.Tensor) else value).split())
    return text if len(text) < 400 else text[:300] + " ... " + text[-80:]
