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


class UnspeakableError(Exception):
    """Cannot be written down."""

    def __str__(self) -> str:
        raise RecursionError


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyError("a"), "KeyError: 'a'"),
        (ValueError("first\nsecond"), "ValueError: first"),
        (MemoryError(), "MemoryError"),
        (OSError("no image <BytesIO object at 0x7f12ab>"), "OSError: no image <BytesIO object>"),
        (UnspeakableError(), "UnspeakableError"),
    ],
)
def test_errors_are_said_in_a_few_words(error, said):
    assert errors.say_error(error) == said


def test_what_is_said_of_a_sample_is_short_and_keeps_its_end():
    error = errors.BadSampleError("decode", "bad_image", "begin " + "x" * 100_000 + " way out.")
    assert len(str(error)) == 1000
    assert str(error).startswith("begin xx")
    assert str(error).endswith("xx way out.")
    assert len(errors.say_error(ValueError("y" * 9999))) < 330


def test_a_sample_is_blamed_for_everything_but_errors_of_the_program():
    own = errors.BadSampleError("read", "truncated", "cut")
    assert errors.blame_sample(own, "encode", "unexpected", "it failed") is own
    blamed = errors.blame_sample(TypeError("no len()"), "encode", "unexpected", "it failed")
    assert (blamed.stage, blamed.reason, str(blamed)) == ("encode", "unexpected", "it failed (TypeError: no len()).")
    for error in (errors.ConfigError("an option"), ImportError("no module"), errors.StorageError("no disk")):
        with pytest.raises(type(error)):
            errors.blame_sample(error, "encode", "unexpected", "it failed")
