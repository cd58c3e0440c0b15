"""Columns of an index are those of pyarrow's own conversion, without pandas."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_stream.shards.columns import to_array, to_numbers
from vlm_stream.shards.schema import index_schema

if TYPE_CHECKING:
    from pathlib import Path

_VALUES = {
    pa.string(): st.text(max_size=8),
    pa.int32(): st.integers(-(2**31), 2**31 - 1),
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.uint32(): st.integers(0, 2**32 - 1),
    pa.float64(): st.floats(allow_nan=False),
}


def _values_of(kind: pa.DataType) -> st.SearchStrategy:
    if pa.types.is_list(kind):
        return st.lists(_values_of(kind.value_type), max_size=3)
    if pa.types.is_struct(kind):
        return st.tuples(*(_values_of(kind.field(number).type) for number in range(kind.num_fields)))
    return _VALUES[kind.value_type if pa.types.is_dictionary(kind) else kind]


@pytest.mark.parametrize("name", index_schema().names)
@given(data=st.data())
def test_arrays_are_those_of_pyarrow(name, data):
    kind = index_schema().field(name).type
    values = data.draw(st.lists(_values_of(kind), max_size=5))
    array = to_array(values, kind)
    array.validate(full=True)
    assert array.equals(pa.array(values, type=kind))


@pytest.mark.parametrize("kind", [pa.int32(), pa.int64(), pa.uint32(), pa.float64()])
@given(data=st.data())
def test_numbers_are_those_of_pyarrow_also_in_a_slice(kind, data):
    whole = pa.array(data.draw(st.lists(_VALUES[kind], max_size=5)), type=kind)
    part = whole.slice(data.draw(st.integers(0, len(whole))))
    expected = part.to_numpy(zero_copy_only=False)
    found = to_numbers(part)
    assert np.array_equal(found, expected)
    assert found.dtype == expected.dtype


def test_a_missing_number_is_refused():
    with pytest.raises(pa.ArrowInvalid, match="1 numbers are missing"):
        to_numbers(pa.array([1, None, 3], type=pa.int32()))


@pytest.mark.parametrize("number", [2**31, -(2**31) - 1])
def test_numbers_beyond_their_column_are_refused(number):
    with pytest.raises(OverflowError):
        to_array([number], pa.int32())


def test_a_conversion_and_its_index_need_no_pandas(write_jsonl, tmp_path: Path):
    path = write_jsonl([{"messages": [{"role": "user", "content": "hello"}]}])
    code = (
        "import sys\n"
        "from vlm_stream.shards import load_manifest, make_shards, read_index\n"
        "from vlm_stream.storage import open_store\n"
        "make_shards(*sys.argv[1:])\n"
        "store = open_store(sys.argv[2])\n"
        "index = read_index(store, load_manifest(store).shards[0])\n"
        "index.span(0), index.sizes(0), index.key(0)\n"
        "assert 'pandas' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(path), str(tmp_path / "out")], check=True)
