"""What the builders of all families share: the user's options, and transformers classes by name."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from typing import Any

from vlm_stream.errors import ConfigError, MissingExtraError
from vlm_stream.testing.chat_templates import ChatStyle, write_template

__all__ = ["Parts", "require_package", "transformers_class"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The options of one `build_processor` call."""

    generation_tags: bool = False
    """Whether the template marks the assistant's turns."""
    chat_template: str | None = None
    """Replaces the family's template."""
    image: dict[str, Any] = field(default_factory=dict)
    """Options of the image processor."""
    video: dict[str, Any] = field(default_factory=dict)
    """Options of the video processor."""
    audio: dict[str, Any] = field(default_factory=dict)
    """Options of the feature extractor."""

    def make_image(self, name: str, **defaults: Any) -> Any:
        """Build the image processor of that class name; the user's options win."""
        return transformers_class(name)(**{**defaults, **self.image})

    def make_video(self, name: str, **defaults: Any) -> Any:
        """Build the video processor of that class name; the user's options win."""
        return transformers_class(name)(**{**defaults, **self.video})

    def make_audio(self, name: str, **defaults: Any) -> Any:
        """Build the feature extractor of that class name; the user's options win."""
        return transformers_class(name)(**{**defaults, **self.audio})

    def write_template(self, style: ChatStyle) -> str:
        """Return the user's template, or the family's."""
        return self.chat_template or write_template(style, generation_tags=self.generation_tags)


def transformers_class(name: str) -> Any:
    """Return a class of transformers; say so when the installed version does not have it."""
    import transformers

    try:
        return getattr(transformers, name)
    except AttributeError:
        raise ConfigError(
            f"transformers {transformers.__version__} has no class {name}, so this family cannot be built. "
            "Upgrade it with: pip install -U transformers"
        ) from None


def require_package(package: str, extra: str, purpose: str) -> None:
    """Raise `MissingExtraError` when a package that only some families need is not installed."""
    if importlib.util.find_spec(package) is None:
        raise MissingExtraError(package, extra, purpose)
