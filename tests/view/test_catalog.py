"""Pages of samples by the index: every sample once, in both directions, under any filter."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from tests.view.conftest import open_viewer
from vlm_stream.errors import InputError
from vlm_stream.format import dataset as dataset_module
from vlm_stream.view import catalog as catalog_module
from vlm_stream.view.catalog import Name
from vlm_stream.view.facts import KINDS, Query
from vlm_stream.view.server import make_app


def all_refs(catalog, query):
    """Look at every sample, one by one: what pages must come to."""
    found = []
    for place in range(catalog.num_samples):
        ref = catalog.ref_at(place)
        (drawn,) = catalog.draw([ref])
        facts = catalog.facts(ref.source, ref.shard)
        sizes = drawn.sizes
        has = {"image": bool(sizes.images), "video": bool(sizes.videos), "audio": bool(sizes.audios)}
        fits = (
            (not query.entry or drawn.entry == query.entry)
            and (not query.kind or (not any(has.values()) if query.kind == "text" else has[query.kind]))
            and (query.tokens_from is None or facts.tokens[ref.row] >= query.tokens_from)
            and (query.tokens_to is None or facts.tokens[ref.row] <= query.tokens_to)
        )
        if fits and query.text:
            (text,) = catalog.texts([ref], [drawn])
            fits = query.text.casefold() in text.casefold()
        if fits:
            found.append(ref)
    return found


queries = st.builds(
    Query,
    entry=st.sampled_from(["", "captions", "dialogues", "clips", "none"]),
    kind=st.sampled_from(["", "text", *KINDS]),
    tokens_from=st.none() | st.integers(0, 400),
    tokens_to=st.none() | st.integers(0, 400),
    text=st.sampled_from(["", "", "River", "no such word"]),
)


@settings(max_examples=40)
@given(queries, st.integers(1, 20))
def test_pages_forwards_and_backwards_are_all_samples_that_match(viewer, query, size):
    catalog = viewer.catalog
    wanted = all_refs(catalog, query)
    found, at = [], 0
    while at is not None:
        page = catalog.page(query, at, size, seconds=60)
        assert len(page.refs) <= size
        found += page.refs
        at = page.after
    assert found == wanted
    found, at = [], catalog.num_samples
    while at is not None:
        page = catalog.page(query, at, size, backwards=True, seconds=60)
        found = list(page.refs) + found
        at = page.before
    assert found == wanted
    if not query.text:
        for source in range(len(catalog.datasets.opened)):
            for shard in range(len(catalog.datasets.opened[source].samples_per_shard)):
                catalog.facts(source, shard)
        assert catalog.count(query) == len(wanted)


def test_a_search_that_runs_out_of_time_goes_on_where_it_stopped(viewer, monkeypatch):
    monkeypatch.setattr(catalog_module, "_MAX_LOOKED", 1)
    catalog, query = viewer.catalog, Query(text="river")
    found, at, cuts = [], 0, 0
    while at is not None:
        page = catalog.page(query, at, 48)
        assert page.texts.keys() == set(page.refs)
        cuts += page.is_cut
        found += page.refs
        at = page.after
    assert found == all_refs(catalog, query)
    assert cuts > 0


def test_names_find_samples_and_places_are_their_inverse(viewer):
    catalog = viewer.catalog
    for place in range(catalog.num_samples):
        ref = catalog.ref_at(place)
        (drawn,) = catalog.draw([ref])
        assert catalog.place_of(ref) == place
        assert catalog.find(catalog.name_of(ref, drawn)) == ref
    with pytest.raises(InputError, match="there is no sample 'nothing' in the shard"):
        catalog.find(Name("data", "shard-000000.tar", "nothing"))
    with pytest.raises(InputError, match="sources here are data"):
        catalog.find(Name("other", "shard-000000.tar", "000000001"))


def test_facts_are_those_of_the_plan_also_of_entries_as_sources(mixed_shards, processor):
    sources = {"url": str(mixed_shards), "weights": {"captions": 1, "clips": 2, "dialogues": 0}}
    viewer = open_viewer(sources, processor)
    try:
        catalog = viewer.catalog
        assert catalog.source_names == ("data:captions", "data:clips")
        for source, shard in catalog.scanned_shards:
            facts = catalog.facts(source, shard)
            columns = viewer.plan.planner.read_columns(source, [shard]).pick(np.arange(len(facts.tokens)))
            np.testing.assert_array_equal(facts.tokens, columns.tokens)
            assert {facts.entry_names[number] for number in facts.entry} == {catalog.source_names[source][5:]}
        seen = [catalog.draw([ref])[0].entry for ref in catalog.page(Query(source="data:clips"), 0, 100).refs]
        assert set(seen) == {"clips"}
    finally:
        viewer.close()


def test_only_the_bytes_of_a_member_are_read(viewer):
    catalog = viewer.catalog
    (ref, *_) = catalog.page(Query(kind="image"), 0, 1).refs
    (drawn,) = catalog.draw([ref])
    name, _, size = next(member for member in drawn.span.members if member[0].endswith("jpg"))
    before = catalog._reader.metrics
    whole = catalog.read_member(drawn, name)
    assert catalog._reader.metrics.bytes_read - before.bytes_read == len(whole) == size
    assert catalog.read_member(drawn, name, 10, 30) == whole[10:30]
    with pytest.raises(InputError, match="has no member 'x'"):
        catalog.read_member(drawn, "x")


def test_an_index_is_decoded_once_for_all_plans_and_pages(mixed_shards, monkeypatch):
    decoded = Counter()

    def count(index, store, entry, **more):
        decoded[entry.name] += 1
        return open_index(index, store, entry, **more)

    def fail(*_args, **_more):
        raise AssertionError("a part of an index was decoded beside the whole")

    open_index = dataset_module.open_index
    monkeypatch.setattr(dataset_module, "open_index", count)
    monkeypatch.setattr(dataset_module, "decode_media", fail)
    viewer = open_viewer(mixed_shards)
    client = TestClient(make_app(viewer))
    for path in ("/dataset", "/step", "/step?window=8&rank=0", "/compare?window_b=16&world_b=2", "/dataset?kind=video"):
        assert client.get(path).status_code == 200
    viewer.catalog._scan.join(240)
    viewer.close()
    assert set(decoded.values()) == {1}
    assert len(decoded) == len(viewer.catalog.scanned_shards)
