"""The schema: values get their declared types, whatever they came as; what cannot be meant gets a sentence."""

from dataclasses import fields
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch

from vlm_stream.collate import ATTENTION_FORMS
from vlm_stream.commands.arguments import media_limits
from vlm_stream.errors import ConfigError
from vlm_stream.loader_options import LoaderOptions, parse_keywords
from vlm_stream.media import MediaLimits
from vlm_stream.options import StreamOptions, flag_fields
from vlm_stream.plan import CostConfig, costs_of_model
from vlm_stream.storage import StoreOptions
from vlm_stream.tokens import FrameRule

SIZES = {
    "text_config": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 512,
    },
    "vision_config": {"hidden_size": 32, "depth": 2, "intermediate_size": 64},
}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"pack_size": "1024"}, {"pack_size": 1024}),
        ({"packing_ratio": 1}, {"packing_ratio": 1.0}),
        ({"shuffle": "no", "bad_budget": 0}, {"shuffle": False, "bad_budget": 0.0}),
        ({"allow": ["plan"]}, {"allow": ("plan",)}),
        ({"store": {"region": "x"}}, {"store": StoreOptions(region="x")}),
        ({"epochs": None, "pixels": False, "fps": 2}, {"epochs": None, "pixels": False, "fps": 2.0}),
    ],
)
def test_values_get_their_declared_types(given, expected):
    for options in (StreamOptions.parse({"pack_size": 64} | given), StreamOptions(**{"pack_size": 64} | given)):
        found = {name: getattr(options, name) for name in expected}
        assert found == expected
        assert [type(value) for value in found.values()] == [type(value) for value in expected.values()]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"pack_size": 0}, "pack_size is 0, but it counts something: give a whole number of at least 1"),
        ({"pack_size": True}, "pack_size is True, but it counts something"),
        ({"pack_size": 1.5}, "pack_size is 1.5, which it cannot be: input should be a valid integer"),
        ({"seed": None}, "seed is None, which it cannot be: input should be a valid integer"),
        ({"mode": "paked"}, "mode is 'paked'; did you mean 'packed'[?] Allowed: grouped, packed, plain"),
        ({"stop": "frst"}, "stop is 'frst'; did you mean 'first'[?] Allowed: all, each, first, never"),
        ({"pixels": "yes"}, "pixels is 'yes'; Allowed: False, True, compact, full"),
        ({"attention": "mask"}, "attention is 'mask'; did you mean 'mask4d'"),
        ({"collate_fn": 3}, "collate is 3, which it cannot be: give a name, or a function"),
        ({"requests_per_s": 0}, "requests_per_s is 0.0, but it must be at least 0.001"),
        ({"max_inflight": 0}, "max_inflight is 0, but it counts something"),
        ({"cache_dir": "x"}, "cache_dir and cache_bytes belong together"),
        ({"store": {"endpoint": "nope"}}, "must begin with http"),
        ({"store": {"regin": "x"}}, "there is no option 'store.regin'; did you mean 'region'"),
        ({"store": {"retry": {"max_retris": 1}}}, "there is no option 'store.retry.max_retris'; did you mean 'max_ret"),
        ({"mode": "plain", "token_budget": 8}, "token_budget makes whole batches of groups, but mode is 'plain'"),
        ({"bad_budget": 2}, "bad_budget is 2.0, but it is a share of all samples"),
        ({"allow": ["x"]}, "allow='x' is no override"),
    ],
)
def test_what_cannot_be_meant_is_refused(given, sentence):
    with pytest.raises(ConfigError, match=sentence):
        StreamOptions.parse({"pack_size": 64} | given)


def test_every_choice_is_known_to_the_rooms():
    """Each value of each Literal makes a plan and a way to read."""
    types = get_type_hints(StreamOptions, localns={"StoreOptions": StoreOptions, "MediaLimits": MediaLimits})
    tried = 0
    for name, hint in types.items():
        for value in (v for part in (hint, *get_args(hint)) for v in get_args(part) if isinstance(v, str | bool)):
            StreamOptions.parse({"pack_size": 64, name: value})
            tried += 1
    assert tried >= 25
    assert set(get_args(types["attention"])) == {*ATTENTION_FORMS, "indexed"}


def test_reads_are_limited_as_the_options_say():
    read = StreamOptions(pack_size=8, max_inflight=3, requests_per_s=5, bytes_per_s=1e6).read()
    assert (read.max_inflight, read.requests_per_s, read.bytes_per_s) == (3, 5.0, 1e6)


def test_ranks_are_balanced_by_the_costs_of_the_model_that_trains():
    costs = StreamOptions(pack_size=8, model_config=SIZES).plan("").balance.costs
    assert costs == costs_of_model(SIZES)
    assert costs != CostConfig()
    for unknown in (None, {"a": 1}, {"text_config": SIZES["text_config"] | {"intermediate_size": [1, 2]}}):
        assert StreamOptions(pack_size=8, model_config=unknown).plan("").balance.costs == CostConfig()


def test_keywords_of_a_loader_are_told_apart():
    stream, loader = parse_keywords(None, {"pack_size": 64, "num_workers": "2", "ledger_path": Path("x")})
    assert (stream.pack_size, stream.pixels, loader.num_workers, loader.ledger_path) == (64, "full", 2, Path("x"))
    stream, loader = parse_keywords(None, {"pack_size": 64, "device": "cpu", "dtype": "float16"})
    assert (stream.pixels, loader.pixel_dtype) == ("compact", torch.float16)
    given = StreamOptions(pack_size=8)
    assert parse_keywords(given, {"device": "cpu"})[0] is given
    assert parse_keywords(None, {"pack_size": 8, "device": "cpu", "pixels": False})[0].pixels is False
    with pytest.raises(ConfigError, match=r"options were given twice, as options= and as keywords [(]seed[)]"):
        parse_keywords(given, {"seed": 1, "num_workers": 1})
    with pytest.raises(ConfigError, match="there is no option 'num_worker'; did you mean 'num_workers'"):
        parse_keywords(None, {"pack_size": 8, "num_worker": 1})


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"num_workers": -1}, "num_workers is -1, but it counts something: give a whole number of at least 0"),
        ({"worker_memory": 0}, "worker_memory is 0, but it counts something"),
        ({"worker_timeout": 0}, "worker_timeout is 0.0, but it must be at least 0.001"),
        ({"start_method": "frk"}, "start_method is 'frk'; did you mean 'fork'"),
        ({"dtype": torch.float32}, "dtype=torch.float32 is that of pixels on a device, but no device is given"),
    ],
)
def test_what_a_loader_cannot_do_is_refused(given, sentence):
    with pytest.raises(ConfigError, match=sentence):
        LoaderOptions(**given)
    assert LoaderOptions(device="cpu", dtype="bfloat16").pixel_dtype is torch.bfloat16
    with pytest.raises(ConfigError, match="dtype='nothing' is no type of torch"):
        _ = LoaderOptions(device="cpu", dtype="nothing").pixel_dtype


def test_every_option_has_one_sentence_of_help():
    declared = [*fields(StreamOptions), *fields(LoaderOptions)]
    assert all(len(each.metadata["help"]) > 8 and each.metadata["help"].endswith(".") for each in declared)
    assert {each.name for each in flag_fields()} >= {"mode", "pack_size", "batch_size", "seed"}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"count": 4, "max_count": 2}, "count is 4, which is not between min_count .4. and max_count .2."),
        ({"min_count": 1}, "there is no max_count, so the number of builders would not change"),
        ({"count": 0, "local": 0}, "nobody would build"),
        ({"counts": 3}, "there is no option 'builders.counts'"),
        ({"num_cpus": -1}, "num_cpus is -1"),
        ({"num_cpus": "many"}, "builders.num_cpus is 'many'"),
        (4, "builders is 4; Allowed: ray, the fields of RayBuilders"),
    ],
)
def test_builders_that_cannot_be_meant_are_refused(given, sentence):
    with pytest.raises(ConfigError, match=sentence):
        LoaderOptions(builders=given)


def test_a_ledger_is_a_file_on_a_disk():
    with pytest.raises(ConfigError, match=r"ledger_path is s3://b/bad\.jsonl, and a ledger is appended to"):
        LoaderOptions(ledger_path="s3://b/bad.jsonl")


def test_builders_and_workers_are_two_things():
    with pytest.raises(ConfigError, match="num_workers is 2 and builders are given"):
        LoaderOptions(builders="ray", num_workers=2)
    assert LoaderOptions(builders="ray").ray == LoaderOptions(builders={}).ray
    with pytest.raises(ConfigError, match="nobody would build"):
        LoaderOptions(builders={"local": 0}).with_builders(0)
    assert LoaderOptions(builders={"count": 2, "max_count": 8}).with_builders(5).ray.limits is None


def test_media_limits_reach_the_encoder_from_recipes_and_flags():
    options = StreamOptions.parse({"mode": "plain", "media_limits": {"video_frames": 5}})
    assert options.encode(FrameRule()).limits == MediaLimits(video_frames=5)
    assert StreamOptions(mode="plain").encode(FrameRule()).limits == MediaLimits()
    with pytest.raises(ConfigError, match=r"no option 'media_limits\.video_frame'; did you mean 'video_frames'"):
        StreamOptions.parse({"mode": "plain", "media_limits": {"video_frame": 5}})
    assert media_limits("image_pixels=20M,file_bytes=1GiB") == MediaLimits(image_pixels=20_000_000, file_bytes=1 << 30)
    assert media_limits(None) is None
    with pytest.raises(ConfigError, match=r"no option 'media_limits\.pixels'"):
        media_limits("pixels=5")
