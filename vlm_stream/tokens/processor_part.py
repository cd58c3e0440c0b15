"""One part of a processor (of images, videos or sound), and its settings as they will be applied."""

from __future__ import annotations

from typing import Any

from vlm_stream.errors import ConfigError


class Part:
    """One part of a processor, seen as its processor will call it: class-wide defaults win over the part's config."""

    def __init__(self, processor: Any, names: tuple[str, ...], modality: str) -> None:
        found = [(name, part) for name in names if (part := getattr(processor, name, None)) is not None]
        self.exists = bool(found)
        self._part: Any = found[0][1] if found else None
        declared = getattr(getattr(processor, "valid_processor_kwargs", None), "_defaults", None) or {}
        self._overrides = declared.get(modality, {})
        self._owner = f"{type(processor).__name__}.{found[0][0] if found else names[0]}"

    def read(self, name: str, default: Any = None) -> Any:
        """Return a setting; a present None reads as the default."""
        value = self._overrides.get(name)
        if value is None:
            value = getattr(self._part, name, None)
        return default if value is None else value

    def whole(self, name: str) -> int:
        return int(self.read(name))

    def ints(self, *names: str, **others: str) -> dict[str, int]:
        """Return whole numbers: fields of a rule; others than their settings are given with the names of these."""
        return {
            field: int(self.read(name)) for field, name in {**dict(zip(names, names, strict=True)), **others}.items()
        }

    def read_size(self, *names: str) -> int:
        """Return the first of these keys that the part's `size` (a dict or an object) holds."""
        size = self.read("size")
        for name in names:
            value = size.get(name) if hasattr(size, "get") else getattr(size, name, None)
            if value:
                return int(value)
        raise ConfigError(
            f"{self._owner} has no {' or '.join(names)} in its size ({size!r}), so its tokens cannot be counted. "
            "Complete the processor's config."
        )

    def grid(self) -> dict[str, int]:
        """Return patches and limits of a Qwen-like part; old versions keep limits as attributes beside `size`."""
        return {
            **self.ints("patch_size", "merge_size"),
            "min_pixels": int(self.read("min_pixels") or self.read_size("min_pixels", "shortest_edge")),
            "max_pixels": int(self.read("max_pixels") or self.read_size("max_pixels", "longest_edge")),
        }

    def cap(self) -> int | None:
        """Return the tokens that frames must share, if the cap of Qwen's video processors is on."""
        return int(self.read("max_video_tokens")) if self.read("cap_pixels_per_frame") else None

    def rate(self) -> dict[str, int]:
        return {"sampling_rate": int(self.read("sampling_rate", 16000))}
