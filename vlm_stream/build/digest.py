"""What a value is, as a digest: equal for equal values in any process, different for different code of one name.

Enters: any value, functions and classes too. Leaves: a digest by structure, not by identity. Code of installed packages
counts by name and version; other code (scripts, notebooks, a project's modules) by what it does, with all that it uses.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import hashlib
import importlib.metadata
import pickle
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor

from vlm_stream.blocks import save_odd

if TYPE_CHECKING:
    from collections.abc import Iterator

_OWN: Final = __name__.partition(".")[0]
_PLAIN: Final = (type(None), bool, int, float, complex, str, bytes, type(...))
_CODE: Final = (types.FunctionType, types.ModuleType, type)
_WRAPPERS: Final = (staticmethod, classmethod, functools.cached_property)
_NOT_CODE: Final = frozenset(("__dict__", "__weakref__", "__module__", "__doc__", "_abc_impl", "__firstlineno__"))
"""Of a class: where it is written, and what Python adds to it."""


def digest_of(value: Any) -> str | None:
    """Return what identifies a value; None: something in it cannot be taken apart."""
    try:
        return _Walk().digest(value).hex()
    except Exception:  # a class may fail in any way when it is taken apart
        return None


class _Walk:
    """Takes one value apart; what occurs in it again is not taken apart again."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[bytes, Any]] = {}
        """Digests by identity, with the values, so that no identity is used again."""
        self._path: dict[int, int] = {}
        """Depth of what is being taken apart: values may hold themselves."""

    def digest(self, value: Any) -> bytes:
        if isinstance(value, _PLAIN) and type(value) in _PLAIN:
            return _hash(type(value).__name__, repr(value))
        if id(value) in self._known:
            return self._known[id(value)][0]
        if id(value) in self._path:
            return _hash("above", len(self._path) - self._path[id(value)])
        self._path[id(value)] = len(self._path)
        try:
            found = _hash(type(value).__name__, *map(self._part, self._parts(value)))
        finally:
            del self._path[id(value)]
        self._known[id(value)] = found, value
        return found

    def _part(self, value: Any) -> bytes:
        return value if isinstance(value, _Digest) else self.digest(value)

    def _parts(self, value: Any) -> Iterator[Any]:
        """Yield what makes up a value."""
        if type(value) in (list, tuple):
            yield from value
        elif type(value) in (set, frozenset):
            yield from sorted(_Digest(self.digest(each)) for each in value)
        elif type(value) in (dict, types.MappingProxyType):
            yield from sorted(_Digest(self.digest(key) + self.digest(each)) for key, each in value.items())
        elif isinstance(value, types.CodeType):
            yield from (value.co_name, value.co_code, value.co_consts, value.co_names, value.co_varnames)
            yield from (value.co_freevars, value.co_flags, value.co_argcount, value.co_kwonlyargcount)
            yield getattr(value, "co_exceptiontable", b"")
        elif isinstance(value, _CODE) or _is_builtin(value):
            yield from self._code(value)
        elif isinstance(value, (property, *_WRAPPERS)):
            yield [getattr(value, name, None) for name in ("fget", "fset", "__func__", "func")]
        elif isinstance(value, types.MemberDescriptorType | types.GetSetDescriptorType):
            yield value.__name__
        elif isinstance(value, Tensor):
            yield save_odd(value) or pickle.dumps((str(value.dtype), value.tolist()))
        else:
            yield from self._reduced(value)

    def _reduced(self, value: Any) -> Iterator[Any]:
        """Yield what pickle would write of any other value."""
        reduce = copyreg.dispatch_table.get(type(value))
        reduced = value.__reduce_ex__(4) if reduce is None else reduce(value)
        if isinstance(reduced, str):  # a global, such as a function that a decorator has wrapped in an object
            yield from (getattr(value, "__module__", ""), reduced, getattr(value, "__wrapped__", None))
            return
        function, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
        yield from (function, arguments, state)
        yield from (list(items or ()), list(pairs or ()))

    def _code(self, value: Any) -> Iterator[Any]:
        """Yield what makes up a function, a class or a module."""
        module: str = getattr(value, "__module__", None) or value.__name__
        yield getattr(value, "__qualname__", value.__name__)
        if (version := _version_of(module.partition(".")[0])) is not None:
            yield from (module, version)
        elif isinstance(value, types.FunctionType):
            yield from (value.__code__, value.__defaults__, value.__kwdefaults__)
            yield [_content(cell) for cell in value.__closure__ or ()]
            yield {name: value.__globals__[name] for name in _names_in(value.__code__) if name in value.__globals__}
        elif isinstance(value, type):
            yield value.__mro__[1:]
            yield {name: each for name, each in vars(value).items() if name not in _NOT_CODE}
        elif isinstance(value, types.ModuleType):
            yield Path(value.__file__).read_bytes() if value.__file__ else b""
            yield {name: each for name, each in vars(value).items() if isinstance(each, _CODE)}
        else:
            yield module


class _Digest(bytes):
    """Is a digest already."""

    __slots__ = ()


def _hash(*parts: Any) -> bytes:
    state = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode("utf-8", "surrogatepass")
        state.update(len(data).to_bytes(8, "little") + data)
    return state.digest()[:16]


def _is_builtin(value: Any) -> bool:
    """Tell whether this is a function that is not written in Python; a method of an object is two things."""
    if not isinstance(value, types.BuiltinFunctionType):
        return False
    return value.__self__ is None or isinstance(value.__self__, types.ModuleType | type)


def _names_in(code: types.CodeType) -> list[str]:
    """Return the names that code looks up outside of itself."""
    inner = [name for each in code.co_consts if isinstance(each, types.CodeType) for name in _names_in(each)]
    return [*code.co_names, *inner]


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return ...


@functools.cache
def _version_of(package: str) -> str | None:
    """Return the version of installed code; None: it is a script or a project, whose code may differ by itself."""
    if package in sys.stdlib_module_names:
        return sys.version
    if package == "__main__":
        return None
    module = sys.modules.get(package)
    places = [getattr(module, "__file__", None) or "", *map(str, getattr(module, "__path__", ()))]
    if package != _OWN and not any(part in ("site-packages", "dist-packages") for part in Path(places[-1]).parts):
        return None
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package.replace("_", "-"))
    return str(getattr(module, "__version__", ""))
