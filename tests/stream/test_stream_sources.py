from pathlib import Path

import pytest

from vlm_stream.errors import ConfigError
from vlm_stream.stream.sources import normalise_sources


def test_a_path_a_list_and_a_mapping_give_the_same_form():
    for sources in ("x/a/", Path("x/a"), ["x/a"], {"data": "x/a"}, {"data": {"url": Path("x/a")}}):
        (source,) = normalise_sources(sources)
        assert (source.name, source.url, source.weight, source.sample_ratio) == ("data", "x/a", 1.0, 1.0)


def test_names_do_not_follow_folders_so_that_a_dataset_may_move():
    assert [s.name for s in normalise_sources(["x/a", "y/a"])] == ["data-0", "data-1"]


def test_weights_are_kept():
    (source,) = normalise_sources({"a": {"url": "s3://b/a", "weight": 2, "sample_ratio": 0.5}})
    assert (source.weight, source.sample_ratio) == (2, 0.5)


@pytest.mark.parametrize(
    ("sources", "sentence"),
    [
        ([], "sources is empty, so there is nothing to stream"),
        ({}, "sources is empty"),
        (3, "sources is a int, so nothing can be opened; give a path or URL"),
        ({"a": 3}, "source 'a' is a int"),
        ({"a": {"weight": 2}}, "source 'a' has no url"),
        ({"a": {"url": "x", "wieght": 2}}, "unknown key 'wieght'; did you mean 'weight'?"),
        ({"a": {"url": "x", "weight": 0}}, "source 'a' has weight=0, but it must be a positive number"),
        ({"a": {"url": "x", "sample_ratio": "all"}}, "source 'a' has sample_ratio='all'"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_a_sentence(sources, sentence):
    with pytest.raises(ConfigError, match=sentence.replace("?", r"\?")):
        normalise_sources(sources)
