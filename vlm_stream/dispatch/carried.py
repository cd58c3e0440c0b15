"""A build config on its way to processes of this machine, where it may name what only Ray's pickle can carry."""

from __future__ import annotations

import contextlib
import pickle
import zlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vlm_stream.build import BuildConfig, Builder, Watch


class _Carried:
    """A config that only Ray's own pickle can take apart: functions of scripts and notebooks.

    Compressed, because of a config that names `__main__` a process would run the script once more.
    """

    def __init__(self, config: BuildConfig, pickled: bytes) -> None:
        self._data, self._modules = zlib.compress(pickled), config.modules()

    def open(self, watch: Watch | None = None) -> Builder:
        builder: Builder = pickle.loads(zlib.decompress(self._data)).open(watch)  # noqa: S301 - the trainer's bytes
        return builder

    def modules(self) -> list[str]:
        return [name for name in self._modules if name != "__main__"]


def for_processes(config: BuildConfig, pickled: bytes) -> Any:
    """Return a config as processes of this machine can load it; `pickled` is what builders on Ray get."""
    with contextlib.suppress(Exception):  # a class may fail in any way when it is taken apart
        if b"__main__" not in pickle.dumps(config):
            return config
    return _Carried(config, pickled)
