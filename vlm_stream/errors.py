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

import re
from difflib import get_close_matches
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
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
    "nearest_name",
    "say_error",
    "shorten",
]

_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")
"""Of an object in memory: the same sample is to give the same line in every ledger."""
_DETAIL_CHARACTERS: Final = 1000
"""What is said of one bad sample: ledgers are read by people and kept whole."""


class VlmStreamError(Exception):
    """Base of everything that this package raises on purpose."""


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
    something about the program: what this package raises on purpose, and a library that is missing.

    Args:
        error: What was raised while one sample was worked on.
        stage: Where, for an error that does not say it itself.
        reason: A short stable code, likewise.
        fact: The beginning of a sentence, to which the error's type and its first line are added, likewise.
    """
    if isinstance(error, BadSampleError):
        return error
    if isinstance(error, (VlmStreamError, ImportError)):
        raise error
    return BadSampleError(stage, reason, f"{fact} ({say_error(error)}).")


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


def shorten(text: str, limit: int = _DETAIL_CHARACTERS) -> str:
    """Return a text of at most `limit` characters: its beginning, and its end where the way out stands.

    >>> shorten("abcdefghijkl", 10)
    'abcde ... '
    """
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
