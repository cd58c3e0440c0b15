"""The toy dataset holds every kind of sample and is the same on every run."""

from __future__ import annotations

import hashlib
import json

import pytest

from vlm_stream.errors import ConfigError
from vlm_stream.testing import make_toy_dataset


def read_samples(meta):
    entries = json.loads(meta.read_text())
    samples = {}
    for name, entry in entries.items():
        text = (meta.parent / entry["file_name"]).read_text()
        samples[name] = (
            json.loads(text)
            if entry["file_name"].endswith(".json")
            else [json.loads(line) for line in text.split("\n") if line]
        )
    return entries, samples


@pytest.mark.parametrize("num_samples", [3, 12, 61])
def test_has_as_many_samples_as_asked_and_every_medium_exists(tmp_path, num_samples):
    entries, samples = read_samples(make_toy_dataset(tmp_path, num_samples=num_samples))
    assert sum(len(rows) for rows in samples.values()) == num_samples
    for name, rows in samples.items():
        folder = tmp_path / entries[name]["media_dir"]
        for row in rows:
            media = [*row.get("images", []), *row.get("image", []), *row.get("videos", [])]
            for medium in media:
                assert (folder / (medium["path"] if isinstance(medium, dict) else medium)).stat().st_size > 0


def test_shows_all_kinds_of_samples(tmp_path):
    _, samples = read_samples(make_toy_dataset(tmp_path, num_samples=40))
    assert {len(row["images"]) for row in samples["captions"]} == {1, 2, 3}
    assert any(row["messages"][0]["role"] == "system" for row in samples["captions"])
    assert {len(row["conversations"]) for row in samples["dialogues"]} == {2, 4, 6, 8}
    assert {len(row["image"]) for row in samples["dialogues"]} == {0, 1}
    assert {(len(row["images"]), len(row["videos"])) for row in samples["clips"]} == {(0, 0), (0, 1), (1, 1)}
    assert any(isinstance(video, dict) for row in samples["clips"] for video in row["videos"])


def test_placeholders_match_media(tmp_path):
    _, samples = read_samples(make_toy_dataset(tmp_path, num_samples=40))
    for rows in samples.values():
        for row in rows:
            text = json.dumps(row)
            assert text.count("<image>") == len(row.get("images", row.get("image", [])))
            assert text.count("<video>") == len(row.get("videos", []))


def test_same_seed_gives_same_bytes(tmp_path):
    def digests(folder, seed):
        make_toy_dataset(folder, num_samples=20, seed=seed)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        return [(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in files]

    assert digests(tmp_path / "a", 7) == digests(tmp_path / "b", 7) != digests(tmp_path / "c", 8)


def test_too_few_samples_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="2 samples do not fill them: ask for 3"):
        make_toy_dataset(tmp_path, num_samples=2)
