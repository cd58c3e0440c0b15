"""What identifies a build: equal for equal values in any process, different where code or values differ."""

import copy
import subprocess
import sys
import textwrap
import threading
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.service.conftest import raw_loader
from vlm_stream import StreamLoader
from vlm_stream.build.digest import digest_of
from vlm_stream.testing import build_processor

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary() | st.fractions(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner) | st.frozensets(st.text())
    ),
    max_leaves=12,
)


def twin(value):
    """Return an equal value of which nothing is the same object, and in which nothing is shared."""
    if isinstance(value, dict):
        return {twin(key): twin(each) for key, each in reversed(value.items())}
    if isinstance(value, list | tuple | frozenset):
        return type(value)([twin(each) for each in value])
    if isinstance(value, str):
        return "".join(list(value))
    return Fraction(value.numerator, value.denominator) if isinstance(value, Fraction) else value


@given(VALUES)
def test_equal_values_have_one_digest(value):
    assert digest_of(value) == digest_of(twin(value)) == digest_of(copy.deepcopy(value)) is not None
    assert digest_of([value, value]) == digest_of([value, twin(value)])


NESTED = st.recursive(st.integers() | st.text() | st.binary(), st.lists, max_leaves=6)


@given(NESTED, NESTED)
def test_different_values_have_different_digests(one, other):
    assert (digest_of(one) == digest_of(other)) == (one == other)


SCRIPT = """
import functools, threading
from vlm_stream.build.digest import digest_of
FACTOR = {factor}
def helper(x):
    return x * FACTOR
class Kept:
    scale: int = 1
    def __init__(self, by): self.by = by
    @property
    def twice(self): return {twice}
    def __call__(self, rows, processor): return [helper(row) + self.by for row in rows]
def collate(rows, processor):
    return [helper(row) for row in rows]
def again(n):
    return n and again(n - 1)
def make(by):
    return lambda rows, processor: [row + by for row in rows]
found = [collate, Kept({by}), make({by}), functools.partial(collate, by={by}), again]
print(*map(digest_of, found))
"""


def digests(tmp_path, name, factor=2, twice="self.by * 2", by=3):
    """Return those of the functions of a script, which another process runs."""
    path = tmp_path / f"{name}.py"
    path.write_text(textwrap.dedent(SCRIPT.format(factor=factor, twice=twice, by=by)))
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=True, timeout=120)
    return done.stdout.split()


def test_code_of_scripts_counts_with_all_that_it_uses(tmp_path):
    first = digests(tmp_path, "first")
    assert "None" not in first
    assert digests(tmp_path, "second") == first  # whatever the script is called, and wherever its objects lie
    differs = {
        "factor": [True, True, False, True, False],
        "twice": [False, True, False, False, False],
        "by": [False, True, True, True, False],
    }
    for (name, wanted), value in zip(differs.items(), [5, "self.by * 3", 4], strict=True):
        other = digests(tmp_path, name, **{name: value})
        assert [one != two for one, two in zip(first, other, strict=True)] == wanted


def test_what_cannot_be_taken_apart_has_no_digest():
    lock = threading.Lock()
    assert digest_of({"lock": lock}) is None
    assert digest_of(lambda: lock) is None


def test_a_value_may_hold_itself():
    one, other = [], []
    one.append(one)
    other.append(other)
    assert digest_of(one) == digest_of(other) != digest_of([[]])


@pytest.mark.parametrize("family", ["qwen2_5_vl", "internvl"])
def test_equal_processors_have_one_digest(family):
    assert digest_of(build_processor(family)) == digest_of(build_processor(family)) is not None


def build_config(shards, **options):
    return raw_loader(shards, **options).stream.plan().build


def test_configs_differ_by_what_batches_depend_on(toy_shards, tmp_path):
    config = build_config(toy_shards)
    reading = build_config(toy_shards, prefetch_bytes=1 << 20, cache_dir=str(tmp_path), cache_bytes=1 << 20)
    assert config.digest() == reading.digest() is not None
    assert config.digest(with_reading=True) != reading.digest(with_reading=True)
    assert config.digest() != build_config(toy_shards, with_refs=True).digest()
    others = (lambda rows, _: rows, lambda rows, _: rows[:1])
    one, other = (replace(config, options=replace(config.options, collate=each)).digest() for each in others)
    assert len({one, other, config.digest(), None}) == 4


def test_a_loader_whose_batches_cannot_be_named_builds_its_own(toy_shards, caplog):
    lock = threading.Lock()
    options = {"mode": "plain", "peers": 2, "rank": 0, "world_size": 1, "num_workers": 1, "start_method": "fork"}
    loader = StreamLoader(
        toy_shards, processor=None, collate_fn=lambda rows, _: {"n": len(rows), "l": lock and 1}, **options
    )
    with loader:
        assert next(iter(loader))["n"] == 1
    assert "not known whether others want the same batches" in caplog.text
