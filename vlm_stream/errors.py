"""The error tree. Every message says three things: the fact, its consequence, and the way out.

VlmStreamError
|-- InputError              what the user gave cannot be used as given (a command ends with exit code 2)
|   |-- ConfigError         an option, a YAML key, an argument of the API
|   |-- SourceError         a meta file or data file that cannot be read at all
|   |-- StateError          a checkpoint that does not belong to this run
|   `-- MissingExtraError   an optional package is needed and not installed
|-- DatasetError            shards, indexes or the manifest contradict themselves or each other
|   `-- ChangedObjectError  an object is no longer the one that the manifest describes
|-- StorageError            bytes could not be read or written
|   |-- NotFoundError       there is nothing at that URL
|   `-- AccessError         the store refused the credentials or the request
|-- BadSampleError          one sample cannot be used; callers record it and go on
|-- BadBudgetError          more bad samples than the budget allows
`-- WorkerError             worker processes keep dying, hanging or failing
"""

from __future__ import annotations

import errno
import os
import re
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "NO_DESCRIPTORS",
    "AccessError",
    "BadBudgetError",
    "BadSampleError",
    "ChangedObjectError",
    "ConfigError",
    "DatasetError",
    "InputError",
    "MissingExtraError",
    "NotFoundError",
    "SourceError",
    "StateError",
    "StorageError",
    "VlmStreamError",
    "WorkerError",
    "blame_sample",
    "hide_secrets",
    "lacks_descriptors",
    "nearest_name",
    "num_descriptors",
    "require",
    "say_error",
    "say_no_descriptors",
    "shorten",
]

NO_DESCRIPTORS: Final = (errno.EMFILE, errno.ENFILE)
"""Errors of opening a file that are the process's or the machine's, never a sample's."""
_USER: Final = re.compile(r"://[^/\s@]*(?:@[^/\s@]*)*@")
_VALUE: Final = re.compile(r"([?&;][^\s=&;?/]{1,80}=)[^\s&;'\"<>)]+")
_BARE_QUERY: Final = re.compile(r"(://[^\s?]*\?)[^\s=&?]{8,}(?=[\s'\",)]|$)")
_OBEYED: Final = {
    code: chr(code).encode("unicode_escape").decode("ascii")
    for code in (
        *(code for code in range(0x20) if chr(code) not in "\n\t"),
        *range(0x7F, 0xA0),  # delete, and the control characters of eight bits: U+009B begins a sequence, too
        *(0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)),  # they turn lines around
        *(0x2028, 0x2029),  # ends of lines
    )
}
_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")
"""Of an object in memory: the same sample is to give the same line in every ledger."""
_DETAIL_CHARACTERS: Final = 1000
"""What is said of one bad sample: ledgers are read by people and kept whole."""


def hide_secrets(text: str) -> str:
    """Return a text in which URLs show no password and no value of a query: signatures are such.

    >>> hide_secrets("GET https://me:secret@host/a.jpg?X-Amz-Signature=abc&v=2 failed")
    'GET https://***@host/a.jpg?X-Amz-Signature=***&v=*** failed'
    """
    if "://" not in text:
        return text
    return _BARE_QUERY.sub(r"\1***", _VALUE.sub(r"\1***", _USER.sub("://***@", text)))


class VlmStreamError(Exception):
    """Base of everything that this package raises on purpose."""

    def __init__(self, *args: object) -> None:
        """Keep the sentence, without secrets: it goes to logs, ledgers and traces."""
        super().__init__(*(hide_secrets(each) if isinstance(each, str) else each for each in args))


class InputError(VlmStreamError):
    """What the user gave cannot be used as given. Its kinds are also those of Python itself."""


class ConfigError(InputError, ValueError):
    """An option, a YAML key or an argument has a value that means nothing here."""


class SourceError(InputError, ValueError):
    """A meta file or a data file cannot be read at all (single bad records go to the ledger instead)."""


class StateError(InputError, ValueError):
    """A saved state does not belong to this dataset, plan or processor."""


class MissingExtraError(InputError, ImportError):
    """An optional package is needed for what was asked."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        """Name the package, the extra that brings it, and what needs it."""
        super().__init__(
            f"{purpose} needs the package '{package}', which is not installed. "
            f"Install it with: pip install 'vlm-stream[{extra}]'"
        )
        self._parts = (package, extra, purpose)

    def __reduce__(self) -> tuple[type[MissingExtraError], tuple[str, str, str]]:
        """Survive the trip from a worker process."""
        return type(self), self._parts


def require(module: str, extra: str, purpose: str) -> Any:
    """Import what an extra brings, or say which one `purpose` needs."""
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingExtraError(module.partition(".")[0], extra, purpose) from error


class DatasetError(VlmStreamError):
    """Shards, indexes or the manifest contradict themselves or each other."""


class ChangedObjectError(DatasetError):
    """An object has another size or etag than when its dataset was written."""


class StorageError(VlmStreamError):
    """Bytes could not be read or written, after all retries."""


class NotFoundError(StorageError):
    """There is nothing at that URL."""


class AccessError(StorageError):
    """The store refused the credentials or the request."""


class BadSampleError(VlmStreamError):
    """One sample cannot be used. It is caught, recorded in the ledger, and leaves a hole; nothing else is lost.

    Attributes:
        stage: Where it failed: "convert", "read", "decode", "encode" or "fit".
        reason: A short stable code that ledgers are counted by, such as "missing_file".
    """

    def __init__(self, stage: str, reason: str, detail: str) -> None:
        """Keep the stage, the countable reason, and a sentence about this very sample."""
        super().__init__(shorten(detail))
        self.stage = stage
        self.reason = reason

    def __reduce__(self) -> tuple[type[BadSampleError], tuple[str, str, str]]:
        """Survive the trip from a worker process."""
        return type(self), (self.stage, self.reason, str(self))

    def bare(self) -> BadSampleError:
        """Return the same without traceback and cause, which would keep the sample's memory."""
        return BadSampleError(self.stage, self.reason, str(self))


class BadBudgetError(VlmStreamError):
    """More samples were bad than the configured rate allows."""


class WorkerError(VlmStreamError):
    """A worker process failed, and replacing it did not help."""


def blame_sample(error: Exception, stage: str, reason: str, fact: str) -> BadSampleError:
    """Return what a sample is charged with; raise the error again where no sample can be blamed for it.

    Bytes of a sample can make a decoder, a template or our own code raise nearly anything, but not errors that say
    something about the program: what this package raises on purpose, a library that is missing, a process that may
    open no more files.

    `stage`, `reason` (a short stable code) and `fact` (the beginning of a sentence) are for an error that does not say
    them itself; its type and first line are added to the fact.
    """
    if isinstance(error, BadSampleError):
        return error
    if isinstance(error, VlmStreamError):
        raise error
    if lacks_descriptors(error) or not _can_open():  # what libraries raise then says anything
        raise StorageError(say_no_descriptors("a sample could not be decoded")) from error
    if isinstance(error, ImportError):
        raise error
    return BadSampleError(stage, reason, f"{fact} ({say_error(error)}).")


def num_descriptors() -> int:
    """Return how many descriptors this process may have open."""
    try:
        import resource
    except ImportError:  # not Unix
        return 512
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft


def _can_open() -> bool:
    """Tell whether this process may open another file."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno not in NO_DESCRIPTORS
    return True


def lacks_descriptors(error: BaseException) -> bool:
    """Tell whether an error says that no more files may be open; a library that is loaded late says so in words alone.

    >>> lacks_descriptors(ImportError("libx.so: cannot open shared object file: Too many open files"))
    True
    """
    if isinstance(error, VlmStreamError) or not isinstance(error, (OSError, ImportError)):
        return False
    return getattr(error, "errno", None) in NO_DESCRIPTORS or os.strerror(errno.EMFILE) in str(error)


def say_no_descriptors(fact: str) -> str:
    """Return the sentence for a process that may open no more files."""
    return (
        f"{fact}: this process has as many files open as it may ({num_descriptors()}), which says nothing about the "
        f"data. Raise the limit (ulimit -n 4096) and resume; the state is good."
    )


def say_error(error: BaseException, limit: int = 300) -> str:
    """Return type and first line of an error, short enough for a sentence.

    >>> say_error(KeyError("text"))
    "KeyError: 'text'"
    """
    try:
        lines = str(error).strip().splitlines()
    except Exception:  # to write down a deeply nested key can fail as well
        lines = []
    first = _ADDRESS.sub("", lines[0]) if lines else ""
    return f"{type(error).__name__}: {shorten(first, limit)}" if first else type(error).__name__


def clean(text: str) -> str:
    r"""Return a text in which what a terminal or a reader would obey is spelled out, and what UTF-8 cannot hold.

    Line ends and tabs stay.

    >>> clean("red \x1b[31m")
    'red \\x1b[31m'
    """
    return text.translate(_OBEYED).encode("utf-8", "backslashreplace").decode("utf-8")


def shorten(text: str, limit: int = _DETAIL_CHARACTERS) -> str:
    """Return a text without secrets and of at most `limit` characters: its beginning, and its end, the way out.

    >>> shorten("abcdefghijkl", 10)
    'abcde ... '
    """
    text = hide_secrets(text)
    if len(text) <= limit:
        return text
    end = limit // 4 if limit > 40 else 0
    return f"{text[: limit - end - 5]} ... {text[len(text) - end :]}"


def nearest_name(name: str, allowed: Iterable[str]) -> str:
    """Return the tail of an error sentence: the nearest allowed name, and all of them.

    >>> nearest_name("pack_sise", ["pack_size", "window"])
    "did you mean 'pack_size'? Allowed: pack_size, window."
    """
    names = sorted(allowed)
    close = get_close_matches(name, names, n=1)
    hint = f"did you mean '{close[0]}'? " if close else ""
    return f"{hint}Allowed: {', '.join(names)}."
