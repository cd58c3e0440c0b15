"""Made-up samples are the same for the same arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from vlm_stream.errors import ConfigError
from vlm_stream.sources import build_mock_vlm_dataset


def texts(example: dict[str, Any]) -> list[list[str]]:
    return [[i["text"] for i in m["content"] if i["type"] == "text"] for m in example["conversation"]]


def test_mock():
    samples = build_mock_vlm_dataset(3, 2, image_size=(20, 10), max_length=7, seed=5)
    assert len(samples) == 3
    user, assistant = samples[0]["conversation"]
    assert [item["type"] for item in user["content"]] == ["image", "image", "text"]
    assert user["content"][0]["image"].size == (20, 10)
    rng = np.random.default_rng(5)  # images come first in the stream of random numbers
    assert np.array_equal(np.asarray(user["content"][0]["image"]), rng.integers(0, 256, (10, 20, 3), dtype=np.uint8))
    assert len(assistant["content"][0]["text"].split()) == 7
    assert texts(samples[2]) == texts(build_mock_vlm_dataset(3, 2, (20, 10), max_length=7, seed=5)[2])
    assert texts(samples[0])[1] != texts(samples[1])[1]
    assert [texts(s)[1] for s in build_mock_vlm_dataset(3, responses=["a", "b"])] == [["a"], ["b"], ["a"]]
    assert len(texts(build_mock_vlm_dataset(1)[0])[1][0].split()) == 256
    with pytest.raises(ConfigError, match="build_mock_vlm_dataset has no option colour; leave it out"):
        build_mock_vlm_dataset(colour=1)
    with pytest.raises(ConfigError, match="responses is an empty list"):
        build_mock_vlm_dataset(responses=[])
