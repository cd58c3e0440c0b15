"""Totals and histograms are those of the samples that are shown."""

import pytest
from starlette.testclient import TestClient

from tests.view.conftest import open_viewer
from vlm_stream.view.facts import Query
from vlm_stream.view.page_dataset import overview_part
from vlm_stream.view.server import make_app


def scanned(viewer):
    """Read all shards' facts."""
    viewer.catalog.start_scan()
    viewer.catalog._scan.join(240)
    return viewer


def test_histograms_count_every_sample_once_all_shards_were_read(viewer):
    scanned(viewer)
    lengths, pixels, seconds = viewer.overview.histograms(Query())
    assert (lengths.name, lengths.num_values, sum(lengths.counts)) == ("Length", 60, 60)
    assert viewer.overview.histograms(Query())[0] is lengths  # kept
    for kind, counts in (("image", (pixels.num_values, None)), ("video", (None, seconds.num_values))):
        query = Query(kind=kind, tokens_from=100)
        refs = viewer.catalog.page(query, 0, 100, seconds=9).refs
        drawn = viewer.catalog.draw(refs)
        shown = {each.name: each.num_values for each in viewer.overview.histograms(query)}
        assert shown["Length"] == len(refs) > 0
        assert shown.get("Images as stored", 0) == sum(len(each.sizes.images) for each in drawn) <= (counts[0] or 99)
        assert shown.get("Clips and sound", 0) == sum(len(each.sizes.videos) for each in drawn) <= (counts[1] or 99)


def test_totals_are_of_the_samples_that_are_shown(mixed_shards, processor):
    """One entry without a weight, and one dataset under two names: neither is counted as the manifest counts it."""
    columns = open_viewer(mixed_shards)
    manifest = columns.catalog.datasets.opened[0].manifest.totals
    columns.close()
    for sources, times in (({"a": str(mixed_shards), "b": str(mixed_shards)}, 2), (str(mixed_shards), 1)):
        viewer = scanned(open_viewer(sources, processor))
        parts = [part for part in viewer.overview.parts() if not part.entry]
        assert all(part.is_exact for part in parts)
        for name in ("samples", "images", "videos", "text_tokens", "text_only"):
            assert sum(part.sums[name] for part in parts) == times * getattr(manifest, name), name
        viewer.close()
    only = {"data": {"url": str(mixed_shards), "weights": {"captions": 1, "dialogues": 0, "clips": 0}}}
    viewer = scanned(open_viewer(only, processor))
    (part,) = [part for part in viewer.overview.parts() if not part.entry]
    drawn = viewer.catalog.draw([viewer.catalog.ref_at(place) for place in range(viewer.catalog.num_samples)])
    assert part.samples == part.sums["samples"] == len(drawn) < manifest.samples
    assert part.sums["images"] == sum(len(each.sizes.images) for each in drawn) < manifest.images
    viewer.close()


def test_figures_of_a_part_of_the_shards_are_scaled_and_say_so(mixed_shards, processor):
    viewer = open_viewer(mixed_shards, processor)
    viewer.catalog.facts(0, 0)
    (part,) = [part for part in viewer.overview.parts() if not part.entry]
    assert not part.is_exact
    assert part.sums["samples"] == pytest.approx(60)
    assert "≈ " in overview_part(viewer.overview, Query())
    viewer.close()


def test_a_page_begins_at_the_place_that_is_named_and_keeps_its_filter(viewer):
    client = TestClient(make_app(viewer))
    text = client.get("/dataset?place=31").text
    assert "from place 31 to" in text
    text = client.get("/dataset?kind=image").text
    assert '<input type="hidden" name="kind" value="image"/>' in text
    assert "Distributions of what matches" in text


def test_on_a_disk_the_text_of_samples_is_looked_through_for_a_shorter_time(viewer, monkeypatch):
    from vlm_stream.view import catalog as module

    monkeypatch.setattr(module, "_DISK_SECONDS", -1.0)
    assert viewer.catalog.page(Query(text="nothing like it"), 0, 48).is_cut
    monkeypatch.setattr(module, "_DISK_SECONDS", 60.0)
    monkeypatch.setattr(module, "_STORE_SECONDS", -1.0)
    assert not viewer.catalog.page(Query(text="nothing like it"), 0, 48).is_cut


def test_the_bytes_of_a_source_are_those_of_its_shards(viewer, mixed_shards):
    """As `stats` has them: the ends of tars belong to no sample."""
    viewer.catalog.start_scan()
    viewer.catalog._scan.join(30)
    part = viewer.overview.parts()[0]
    assert part.sums["bytes"] == sum(path.stat().st_size for path in mixed_shards.glob("*.tar"))
