"""The scanners must cut exactly where a parser would, whatever the text and wherever a chunk ends."""

from __future__ import annotations

import io
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm_stream.errors import SourceError
from vlm_stream.sources.json_file import SpanBuilder, scan_array, scan_lines

# Characters that look like structure, escapes of every length, and text of one to four UTF-8 bytes.
tricky = st.text(alphabet=st.sampled_from('[]{},:"\\ \n\tabé漢🙂')) | st.text(st.characters(exclude_categories=("Cs",)))
values = st.recursive(
    st.none() | st.booleans() | st.integers() | tricky,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(tricky, inner, max_size=3),
    max_leaves=8,
)
layouts = st.tuples(st.booleans(), st.sampled_from([None, 0, 2]), st.sampled_from(["", "\n", " \r\n\t"]))


@settings(deadline=None)
@given(records=st.lists(values, max_size=8), layout=layouts, chunk_bytes=st.integers(1, 40))
def test_array_spans_hold_the_elements(records: list[object], layout: tuple[bool, int | None, str], chunk_bytes: int):
    ascii_only, indent, around = layout
    text = around + json.dumps(records, ensure_ascii=ascii_only, indent=indent) + around
    data = text.encode()
    spans = scan_array(io.BytesIO(data), "a.json", chunk_bytes=chunk_bytes)
    found = [data[b : b + s] for b, s in zip(spans.begins.tolist(), spans.sizes.tolist(), strict=True)]
    assert [json.loads(part) for part in found] == records
    for part, begin, line in zip(found, spans.begins.tolist(), spans.lines.tolist(), strict=True):
        if part.strip()[:1] in (b"{", b"[", b'"'):
            first_byte = begin + len(part) - len(part.lstrip())
            assert line == 1 + data[:first_byte].count(b"\n")


@settings(deadline=None)
@given(records=st.lists(values, max_size=4), chunk_bytes=st.integers(1, 40), data=st.data())
def test_damage_never_passes_for_records(records: list[object], chunk_bytes: int, data: st.DataObject):
    damaged = bytearray(json.dumps(records, ensure_ascii=False).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(1, len(damaged)))  # the opening bracket stays: it says that this is an array
        piece = data.draw(st.sampled_from([b"", b'"', b"\\", b"[", b"]", b"{", b"}", b",", b":", b"\n", b"\xff", b"1"]))
        damaged[position : position + data.draw(st.integers(0, 2))] = piece
    text = bytes(damaged)
    try:
        expected = json.loads(text)
    except ValueError:
        expected = None
    try:
        spans = scan_array(io.BytesIO(text), "a.json", chunk_bytes=chunk_bytes)
        pieces = zip(spans.begins.tolist(), spans.sizes.tolist(), strict=True)
        found = [json.loads(text[begin : begin + size]) for begin, size in pieces]
    except (ValueError, SourceError):
        found = None
    assert found == expected


@settings(deadline=None)
@given(
    lines=st.lists(
        values.map(lambda v: json.dumps(v, ensure_ascii=False)) | st.sampled_from(["", " ", "\t\r"]), max_size=8
    ),
    ending=st.sampled_from(["\n", "\r\n"]),
    last_newline=st.booleans(),
    chunk_bytes=st.integers(1, 40),
)
def test_line_spans_hold_the_filled_lines(lines: list[str], ending: str, last_newline: bool, chunk_bytes: int):
    data = (ending.join(lines) + (ending if last_newline else "")).encode()
    spans = scan_lines(io.BytesIO(data), chunk_bytes=chunk_bytes)
    expected = [(number, line.strip()) for number, line in enumerate(data.split(b"\n"), 1) if line.strip()]
    found = [
        (line, data[b : b + s].strip())
        for line, b, s in zip(spans.lines.tolist(), spans.begins.tolist(), spans.sizes.tolist(), strict=True)
    ]
    assert found == expected


@settings(deadline=None)
@given(records=st.lists(values, min_size=1, max_size=5), chunk_bytes=st.integers(1, 40), data=st.data())
def test_a_cut_array_is_refused(records: list[object], chunk_bytes: int, data: st.DataObject):
    whole = json.dumps(records).encode()
    cut = data.draw(st.integers(1, len(whole) - 1))
    with pytest.raises(
        SourceError, match=r"a\.json: the array does not end: the file stops .* in record \d+ that begins on"
    ):
        scan_array(io.BytesIO(whole[:cut]), "a.json", chunk_bytes=chunk_bytes)


@pytest.mark.parametrize("text", ['[{"a": 1}}, {"b": 2}]', "[1]\n[2]", "[1] x", "[1]\\", '[{"a": 1}, 2}\n'])
@pytest.mark.parametrize("chunk_bytes", [1, 3, 100])
def test_what_follows_an_array_is_refused(text: str, chunk_bytes: int):
    with pytest.raises(SourceError, match=r"the array ends near byte .* and more follows"):
        scan_array(io.BytesIO(text.encode()), "a.json", chunk_bytes=chunk_bytes)


@pytest.mark.parametrize("text", ["[]", "[ \n ]", " [\n]\n"])
def test_an_empty_array_has_no_records(text: str):
    assert len(scan_array(io.BytesIO(text.encode()), "a.json", chunk_bytes=1)) == 0


def test_spans_widen_for_files_beyond_4_gib():
    builder = SpanBuilder()
    for begin, end, line in ((0, 10, 1), (10, 30, 2), (30, 2**33, 2**32 + 3), (2**33, 2**33 + 1, 4)):
        builder.add(begin, end, line)
    spans = builder.build()
    assert spans.begins.tolist() == [0, 10, 30, 2**33]
    assert spans.sizes.tolist() == [10, 20, 2**33 - 30, 1]
    assert spans.lines.tolist() == [1, 2, 2**32 + 3, 4]


def test_a_trailing_comma_leaves_an_empty_record():
    spans = scan_array(io.BytesIO(b"[1, 2,]"), "a.json")
    assert spans.sizes.tolist() == [1, 1, 0]
