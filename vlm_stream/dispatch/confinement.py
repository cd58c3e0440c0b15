"""A builder gives up what decoding does not need, before it sees the first sample.

Enters: how much memory it may still take. Leaves: a process that can make no socket, start no program, look into no
other process and leave no core, and whose allocations fail at a limit. It cannot take any of that back. Files are as
they were: it reads and writes what its user may, and answers its parent.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct
from pathlib import Path
from typing import Final

from vlm_stream.errors import ConfigError

_MACHINE: Final = "x86_64"
_ARCHITECTURE: Final = 0xC000003E  # names of linux/audit.h, linux/seccomp.h and linux/filter.h
_SECCOMP: Final = 317
_SET_MODE_FILTER: Final = 1
_ALL_THREADS: Final = 1
_NO_NEW_PRIVILEGES: Final = 38
_LOAD, _IF_EQUAL, _IF_LEAST, _IF_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16  # offsets in what a filter sees of a call
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_OTHER_NUMBERS: Final = 0x40000000  # the same calls by the x32 interface
_CLONE, _CLONE3, _THREAD = 56, 435, 0x10000
_REFUSED: Final = {
    "socket": 41, "connect": 42, "accept": 43, "bind": 49, "listen": 50, "socketpair": 53, "accept4": 288,
    "fork": 57, "vfork": 58, "execve": 59, "execveat": 322,
    "kill": 62, "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "pidfd_getfd": 438,
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427,
}  # fmt: skip


def confine(num_bytes: int) -> None:
    """Confine this process, all of its threads, and what they will be.

    Args:
        num_bytes: How much address space it may take beyond what it has now.

    Raises:
        ConfigError: It cannot be done here.
    """
    if platform.system() != "Linux" or platform.machine() != _MACHINE:
        raise _impossible(f"this is {platform.system()} on {platform.machine()}")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * os.sysconf("SC_PAGE_SIZE") + num_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    _filter_calls()


def _filter_calls() -> None:
    code = _program()
    held = ctypes.create_string_buffer(code, len(code))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(held)))
    library = ctypes.CDLL(None, use_errno=True)
    library.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    # Not by prctl: threads that run already would stay as they are.
    if library.syscall(_SECCOMP, _SET_MODE_FILTER, _ALL_THREADS, ctypes.byref(program)):
        raise _impossible(f"the system refuses a filter of calls: {os.strerror(ctypes.get_errno())}")


def _program() -> bytes:
    """Return the filter: each step is a code, how many steps to skip if it holds and if not, and a number."""
    steps = [
        (_LOAD, 0, 0, _ARCH), (_IF_EQUAL, 1, 0, _ARCHITECTURE), (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_IF_LEAST, 0, 1, _OTHER_NUMBERS), (_RETURN, 0, 0, _ERROR | errno.EPERM),
        (_IF_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ERROR | errno.ENOSYS),  # the C library then takes clone
        (_IF_EQUAL, 0, 4, _CLONE), (_LOAD, 0, 0, _FIRST_ARGUMENT), (_IF_BITS, 0, 1, _THREAD),
        (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERROR | errno.EPERM),
    ]  # fmt: skip
    for number in _REFUSED.values():
        steps += [(_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERROR | errno.EPERM)]
    steps.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("HBBI", *step) for step in steps)


def _impossible(why: str) -> ConfigError:
    return ConfigError(
        f"confine is set, and a worker process cannot be confined ({why}), so it builds nothing; leave confine out, "
        f"and run in a container without networks where the data are not trusted"
    )
