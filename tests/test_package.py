"""The package from outside: what it exports, what importing it costs."""

import subprocess
import sys

import pytest

import vlm_stream


def test_public_names_are_sorted_and_all_resolve():
    assert sorted(vlm_stream.__all__) == vlm_stream.__all__
    assert all(getattr(vlm_stream, name) is not None for name in vlm_stream.__all__)


def test_importing_the_package_imports_nothing_heavy():
    code = "import sys, vlm_stream, vlm_stream.cli, vlm_stream.testing; print(*sys.modules)"
    modules = set(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )
    assert not modules & {"torch", "transformers", "numpy", "pyarrow", "obstore", "PIL", "rich", "pydantic"}


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="Nothing"):
        vlm_stream.Nothing  # noqa: B018
