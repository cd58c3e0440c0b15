"""Memory that is freed and wanted again, kept: for worker processes, which do nothing else all day.

glibc gives large blocks back to the system when they are freed, and takes new ones whose every page is a fault.
Pictures and their pixels are such blocks, of a few hundred kilobytes to some ten megabytes: measured on Qwen2.5-VL
images, the faults were a third of the time that encoding took. The price is that a process stays as large as it was.
"""

import os
from pathlib import Path
from typing import Final

_TRIM_THRESHOLD: Final = -1  # names of malloc.h
_MMAP_MAX: Final = -4
_KEPT_BYTES: Final = 512 << 20
_CHOSEN_BY_THE_USER: Final = (
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_MMAP_MAX_",
    "GLIBC_TUNABLES",
    "LD_PRELOAD",
)


def keep_freed_memory() -> bool:
    """Let this process keep what it frees, up to half a gigabyte; tell whether that could be done.

    It is not where there is no glibc, and not where the environment says how memory is to be managed.
    """
    import ctypes

    if any(name in os.environ for name in _CHOSEN_BY_THE_USER):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # musl, macOS, Windows
        return False
    # No block gets a mapping of its own, however large, so that freeing it does not end the mapping.
    return bool(mallopt(_MMAP_MAX, 0)) and bool(mallopt(_TRIM_THRESHOLD, _KEPT_BYTES))


def resident_bytes(pid: int | str = "self") -> int:
    """Return the memory that a process has, this one by default; 0 where the system does not tell."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
