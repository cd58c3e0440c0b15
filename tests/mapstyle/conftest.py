"""Small conversations with real media."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch

from vlm_stream.testing import build_processor, make_toy_image

if TYPE_CHECKING:
    from collections.abc import Iterator


def talk(text: str, *media: Any, answer: str = "It is a ship.") -> dict[str, Any]:
    """Return a sample with its media in front of the text."""
    content = [{"type": "image", "image": image} for image in media] + [{"type": "text", "text": text}]
    turns = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": [{"type": "text", "text": answer}]},
    ]
    return {"conversation": turns}


@cache
def small_processor() -> Any:
    size = {"shortest_edge": 56 * 56, "longest_edge": 112 * 112}
    return build_processor("qwen2_5_vl", image={"size": size}, video={"size": size})


@pytest.fixture(scope="session")
def processor() -> Any:
    return small_processor()


@pytest.fixture
def samples() -> list[dict[str, Any]]:
    """Return eight samples; every other one shows an image."""
    return [talk("word " * (3 * i + 1), *([make_toy_image(56 + 14 * i, 84, i)] if i % 2 else [])) for i in range(8)]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Encoding small samples is fastest on one thread, above all on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
