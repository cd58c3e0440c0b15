"""A process that keeps freed memory does not fault it in again; one that may not be tuned is left alone."""

import json
import subprocess
import sys

import pytest

from vlm_stream.allocator import _CHOSEN_BY_THE_USER

_CODE = """
import json, resource, sys
from vlm_stream.allocator import keep_freed_memory

kept = keep_freed_memory() if sys.argv[1] == "keep" else False

def work():
    blocks = [b"x" * (4 << 20) for _ in range(8)]

work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    work()
print(json.dumps([kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before]))
"""


def faults(monkeypatch, how, **environment):
    for name in _CHOSEN_BY_THE_USER:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    done = subprocess.run([sys.executable, "-c", _CODE, how], check=True, text=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc is what is tuned")
def test_freed_memory_is_used_again(monkeypatch):
    kept, few = faults(monkeypatch, "keep")
    if not kept:
        pytest.skip("this system's C library cannot be tuned")
    _, many = faults(monkeypatch, "as it is")
    assert few < many / 10


def test_what_the_user_chose_stands(monkeypatch):
    assert faults(monkeypatch, "keep", MALLOC_TRIM_THRESHOLD_="131072")[0] is False
