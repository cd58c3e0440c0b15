"""Arrow columns without `pyarrow.array` and `to_numpy`: both import pandas, where it is installed.

That is a third of a second and some 40 MB for every process that writes or reads an index, for nothing.

Enters: Python values without nulls, and an Arrow type made of numbers, strings, dictionaries, lists and structs.
Leaves: an Arrow array; or numpy numbers from one.
"""

from __future__ import annotations

from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    import pyarrow as pa

__all__ = ["to_array", "to_numbers"]


def to_array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Return the array of `values`; a struct's values are tuples in the order of its fields."""
    import pyarrow as pa

    if pa.types.is_struct(kind):
        columns = list(zip(*values, strict=True)) or [()] * kind.num_fields
        fields = [to_array(column, kind.field(number).type) for number, column in enumerate(columns)]
        return pa.Array.from_buffers(kind, len(values), [None], children=fields)
    if pa.types.is_list(kind):
        children = [to_array(list(chain.from_iterable(values)), kind.value_type)]
        return pa.Array.from_buffers(kind, len(values), [None, _splits(values)], children=children)
    if pa.types.is_dictionary(kind):
        numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
        places = to_array([numbers[value] for value in values], kind.index_type)
        return pa.DictionaryArray.from_arrays(places, to_array(list(numbers), kind.value_type))
    if pa.types.is_string(kind):
        encoded = [value.encode() for value in values]
        return pa.Array.from_buffers(kind, len(values), [None, _splits(encoded), pa.py_buffer(b"".join(encoded))])
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(_numbers(values, kind.to_pandas_dtype()))])


def _numbers(values: Sequence[Any], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    wide = np.array(values, dtype=np.result_type(dtype, np.int64))  # int64, or float64 for floats
    numbers = wide.astype(dtype)
    if not np.array_equal(numbers, wide, equal_nan=True):  # older numpy wraps around in silence
        raise OverflowError(f"a number does not fit into {np.dtype(dtype)}.")
    return numbers


def _splits(values: Sequence[Any]) -> pa.Buffer:
    import pyarrow as pa

    return pa.py_buffer(np.array(list(accumulate(map(len, values), initial=0)), dtype=np.int32))


def to_numbers(array: pa.Array) -> npt.NDArray[Any]:
    """Return an array's numbers, read-only and without a copy; raise `ArrowInvalid` where one is missing."""
    import pyarrow as pa

    dtype = np.dtype(array.type.to_pandas_dtype())  # a numpy type, whatever its name says
    if array.null_count:
        raise pa.ArrowInvalid(f"{array.null_count} numbers are missing")
    if not len(array):
        return np.empty(0, dtype)
    return np.frombuffer(array.buffers()[1], dtype, len(array), array.offset * dtype.itemsize)
