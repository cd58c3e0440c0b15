"""`/dev/shm` without room for anything, a real one: a slower way and a sentence, no crash."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, logging, sys
logging.basicConfig(level=logging.WARNING)
from vlm_stream import StreamLoader
options = dict(processor=sys.argv[2], mode="plain", batch_size=6, with_refs=True, bad_budget=None)
loader = StreamLoader(sys.argv[1], **options, num_workers=2, worker_timeout=60, **json.loads(sys.argv[3]))
refs = [batch["refs"] for batch in loader]
print(json.dumps([refs, loader.ledger.num_bad]))
"""
FILL = "mount -t tmpfs -o size=8k,nr_inodes=4 none /dev/shm && { cat /dev/zero > /dev/shm/full || true; } 2>/dev/null"


def run_in_full_memory(*arguments):
    """Run the script where nothing fits into /dev/shm, in a mount namespace of its own."""
    command = ["unshare", "--user", "--map-root-user", "--mount"] if os.getuid() else ["unshare", "--mount"]
    command += ["sh", "-c", f'{FILL}; exec "$@"', "sh", sys.executable, "-c", SCRIPT, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=Path.cwd(), check=False)
    if "unshare failed" in done.stderr or "permission denied" in done.stderr.lower():
        pytest.skip("this machine allows no mount namespaces")
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout), done.stderr


@pytest.mark.parametrize("more", [{}, {"peers": 2}], ids=["alone", "peers"])
def test_batches_come_where_shared_memory_is_full(toy_shards, saved_processor, more):
    (refs, num_bad), said = run_in_full_memory(toy_shards, saved_processor, json.dumps(more))
    assert sum(len(row) for batch in refs for row in batch) == 60
    assert num_bad == 0
    assert ("shared memory cannot be used (No space left on device)" in said) == bool(more)
