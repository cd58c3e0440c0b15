"""Let torchvision be imported beside a torch build whose binary interface it does not match.

A CPU wheel of torch next to the registry's torchvision cannot load torchvision's compiled library; torchvision then
fails on import because two operators were never declared, and transformers, which only looks whether the package is
there, cannot build a processor any more. Declaring the two operators is enough for everything in
`torchvision.transforms`; `torchvision.ops.nms` and `torchvision.io` stay unusable.

`install()` imports nothing heavy: it leaves a finder that acts when somebody imports torchvision, and that does
nothing at all where torchvision's own library loads.
"""

import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

_SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_keep_alive: list[Any] = []


class _ShimFinder:
    """Runs once, just before torchvision is imported, and then steps aside."""

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,  # noqa: ARG002 - the import system passes it
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        if name != "torchvision":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torchvision")
        if spec is not None and not _library_loads(spec) and not _is_declared():
            _declare_operators()
        return spec


def install() -> None:
    """Arrange for the operators to be declared, if they are needed, when torchvision is first imported."""
    if "torchvision" in sys.modules or any(isinstance(finder, _ShimFinder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _ShimFinder())


def _library_loads(spec: ModuleSpec) -> bool:
    import torch

    libraries = [lib for folder in spec.submodule_search_locations or [] for lib in Path(folder).glob("_C*.so")]
    if not libraries:
        return False
    try:
        torch.ops.load_library(str(libraries[0]))  # type: ignore[no-untyped-call]
    except OSError:
        return False
    return True


def _is_declared() -> bool:
    """Tell whether another copy of this shim, such as one that Python starts with, has been here before."""
    import torch

    return hasattr(torch.ops.torchvision, "nms")


def _declare_operators() -> None:
    import torch

    library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for operator in ("nms", "qnms"):
        library.define(operator + _SIGNATURE)  # type: ignore[no-untyped-call]
    _keep_alive.append(library)  # dropping the object would withdraw the operators
