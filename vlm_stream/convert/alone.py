"""One writer at a time: file locks on this machine, and among all that share a folder whose file system has locks.

Enters: a store and the name of a lock. Leaves: a context in which the lock is held; the death of a process releases it.
"""

import hashlib
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from vlm_stream.convert.job import is_local
from vlm_stream.storage import Store

logger = logging.getLogger(__name__)


def user_cache() -> Path:
    given = os.environ.get("XDG_CACHE_HOME")
    return Path(given) / "vlm_stream" if given else Path("~/.cache/vlm_stream").expanduser()


@contextmanager
def alone(store: Store, name: str, does: str, what: str) -> Iterator[None]:
    """Hold a lock, on this machine and among all that share the folder of a local store; without locks nobody waits.

    Args:
        store: What is written to.
        name: The lock's file in it.
        does: What the process that holds it does, for messages.
        what: What it does that to, for messages.
    """
    digest = hashlib.blake2b(f"{store.root}/{name}".encode(), digest_size=10).hexdigest()
    mine = Path(tempfile.gettempdir(), f"vlm_stream-{getattr(os, 'getuid', int)()}")
    places = [folder / f"{digest}.lock" for folder in (user_cache() / "locks", mine)]
    if is_local(store):
        places.insert(0, Path(store.root, name))
    for place in places:
        file = _lock(place, does, what)
        if file is None:
            continue
        with file:
            try:
                yield
            finally:
                with suppress(OSError):  # before it is released: a process that waits for it then sees that it is gone
                    place.unlink()
        return
    yield


def _lock(place: Path, does: str, what: str) -> IO[str] | None:
    """Return the file, locked; None where there are no locks."""
    try:
        import fcntl

        place.parent.mkdir(parents=True, exist_ok=True)
        has_told = False
        while True:
            file = place.open("w")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not has_told:
                    logger.warning("another process %s %s; waiting for it", does, what)
                has_told = True
                fcntl.flock(file, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), place.stat()):
                    return file
            file.close()
    except (OSError, ImportError):
        return None
