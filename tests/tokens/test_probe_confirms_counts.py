"""Counts are called exact only when the processor itself has confirmed them."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from transformers import AutoProcessor

from vlm_stream.testing import FAMILIES, build_processor
from vlm_stream.tokens import Geometry, probe_geometry
from vlm_stream.tokens.rules.grids import PatchGrid

# torch's tensors and numpy 2 disagree about a keyword inside the GLM processor; it is not about our counts.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_confirmed(family, tmp_path):
    build_processor(family).save_pretrained(tmp_path)
    processor = AutoProcessor.from_pretrained(tmp_path)
    geometry = Geometry.from_processor(processor)
    assert probe_geometry(processor, geometry) is geometry


def test_rule_that_does_not_fit_makes_an_estimate(caplog):
    processor = build_processor("qwen2_5_vl")
    geometry = replace(Geometry.from_processor(processor), image=PatchGrid(max_pixels=7840))
    assert not probe_geometry(processor, geometry).is_exact
    assert re.search(r"gives \d+ tokens for a probe \(an image\) that was counted as \d+", caplog.text)


def test_processor_that_fails_makes_an_estimate(caplog):
    processor = build_processor("qwen2_5_vl")
    processor.image_processor.image_mean = None
    geometry = probe_geometry(processor, Geometry.from_processor(processor))
    assert not geometry.is_exact
    assert "Qwen2_5_VLProcessor failed on a probe (an image)" in caplog.text


def test_a_guess_needs_no_probe():
    assert probe_geometry(None, Geometry.unknown()) == Geometry.unknown()


def test_cap_that_the_config_does_not_tell_is_noticed(caplog):
    processor = build_processor("qwen3_vl", video={"cap_pixels_per_frame": True})
    geometry = Geometry.from_processor(processor)
    assert probe_geometry(processor, geometry).is_exact
    blind = replace(geometry, video=replace(geometry.video, capped_tokens=None))
    assert not probe_geometry(processor, blind).is_exact
    assert "for a probe (a video)" in caplog.text
