import doctest
import pickle

import pytest

from vlm_stream import errors


def test_nearest_name_names_the_closest_and_all():
    assert doctest.testmod(errors).failed == 0
    assert errors.nearest_name("zzz", ["window"]) == "Allowed: window."


def test_every_exported_error_is_in_the_tree_that_the_docstring_draws():
    for name in errors.__all__:
        if name.endswith("Error"):
            assert issubclass(getattr(errors, name), errors.VlmStreamError)
            assert name in (errors.__doc__ or "")


def test_bad_sample_error_survives_pickling():
    error = pickle.loads(pickle.dumps(errors.BadSampleError("read", "crc_mismatch", "byte 3 differs")))
    assert (error.stage, error.reason, str(error)) == ("read", "crc_mismatch", "byte 3 differs")


def test_missing_extra_survives_pickling():
    error = errors.MissingExtraError("lmdb", "lmdb", "Reading LMDB")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_missing_extra_says_how_to_install():
    with pytest.raises(errors.InputError, match=r"Reading LMDB needs the package 'lmdb'.*vlm-stream\[lmdb\]"):
        raise errors.MissingExtraError("lmdb", "lmdb", "Reading LMDB")
