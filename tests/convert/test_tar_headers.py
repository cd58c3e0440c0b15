"""Our tars are what tarfile reads; anybody's tars are what our parser reads."""

from __future__ import annotations

import io
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_stream.convert.tar import END_OF_TAR, iter_members, member_header, padding
from vlm_stream.errors import DatasetError

names = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), min_size=1, max_size=300).filter(
    lambda name: not name.endswith("/") and name.strip("/")
)
files = st.lists(st.tuples(names, st.binary(max_size=1500)), max_size=5)


def write_ours(members: list[tuple[str, bytes]]) -> bytes:
    parts = [member_header(name, len(data)) + data + bytes(padding(len(data))) for name, data in members]
    return b"".join(parts) + END_OF_TAR


@given(files)
def test_tarfile_reads_what_we_write(members: list[tuple[str, bytes]]) -> None:
    with tarfile.open(fileobj=io.BytesIO(write_ours(members))) as tar:
        assert [(member.name, tar.extractfile(member).read()) for member in tar] == members


@given(files, st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]))
def test_we_read_what_tarfile_writes_and_know_where_it_lies(members: list[tuple[str, bytes]], form: int) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form, encoding="utf-8") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            info.mtime = 1.5 if form == tarfile.PAX_FORMAT else 1
            try:
                tar.addfile(info, io.BytesIO(data))
            except ValueError:
                return  # plain ustar has no room for such a name
    blob = buffer.getvalue()
    with tarfile.open(fileobj=io.BytesIO(blob)) as tar:
        expected = [(member.name, member.offset, member.offset_data, member.size) for member in tar]
    found = list(iter_members(io.BytesIO(blob).read))
    assert [(m.name, m.begin, m.offset, len(m.content)) for m in found] == expected
    assert b"".join(m.header + m.content + m.pad for m in found) == blob[: found[-1].end if found else 0]


def test_folders_and_links_are_passed_over() -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for kind, name in ((tarfile.DIRTYPE, "folder"), (tarfile.SYMTYPE, "link"), (tarfile.REGTYPE, "folder/file")):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "target" if kind == tarfile.SYMTYPE else ""
            tar.addfile(info, io.BytesIO())
    assert [member.name for member in iter_members(io.BytesIO(buffer.getvalue()).read)] == ["folder/file"]


def test_sizes_beyond_ustar_are_written_as_pax() -> None:
    header = member_header("film.mp4", 9 * 2**30)
    info = tarfile.TarInfo.frombuf(header[-512:], "utf-8", "strict")
    assert (info.name, info.size) == ("film.mp4", 0)
    assert b" size=9663676416\n" in header[:-512]


def test_base_256_sizes_are_read() -> None:
    info = tarfile.TarInfo("big.bin")
    info.size = 9 * 2**30
    blob = info.tobuf(tarfile.GNU_FORMAT)
    with pytest.raises(DatasetError, match="of 9663676416 bytes"):
        list(iter_members(io.BytesIO(blob).read))


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda blob: blob[:300], "ends inside the header at byte 0"),
        (lambda blob: blob[:800], r"ends inside the file whose header is at byte 0 \(288 of 700 bytes\)"),
        (lambda blob: b"\0" * 3 + b"x" + blob[4:], "header at byte 0 is damaged"),
        (lambda blob: blob[:1536] + b"x" + blob[1537:], "header at byte 1536 is damaged"),
    ],
)
def test_damage_is_named_with_its_place(damage, sentence: str) -> None:
    blob = write_ours([("a.txt", b"1" * 700), ("b.txt", b"2")])
    with pytest.raises(DatasetError, match=sentence):
        list(iter_members(io.BytesIO(damage(blob)).read))


def test_damaged_extensions_are_named() -> None:
    blob = write_ours([("ä" * 60, b"1")])
    with pytest.raises(DatasetError, match="PAX header before byte 1024 is damaged"):
        list(iter_members(io.BytesIO(blob[:512] + b"zz" + blob[514:]).read))
    with pytest.raises(DatasetError, match="ends after an extension header at byte 0"):
        list(iter_members(io.BytesIO(blob[:1024]).read))


def test_unknown_kinds_and_sparse_files_are_refused() -> None:
    info = tarfile.TarInfo("a")
    info.type = b"Z"
    with pytest.raises(DatasetError, match="unknown type b'Z'"):
        list(iter_members(io.BytesIO(info.tobuf()).read))
    info = tarfile.TarInfo("a")
    info.pax_headers = {"GNU.sparse.major": "1"}
    with pytest.raises(DatasetError, match="stored sparse"):
        list(iter_members(io.BytesIO(info.tobuf(tarfile.PAX_FORMAT)).read))


@pytest.mark.parametrize("size", ["many", "-5", "1e3", "9" * 40, "", "٣x"])
def test_sizes_that_are_none_are_damage(size: str) -> None:
    info = tarfile.TarInfo("a")
    info.pax_headers = {"size": size}
    with pytest.raises(DatasetError, match=r"the PAX header at byte 0 has the size .*: it is damaged"):
        list(iter_members(io.BytesIO(info.tobuf(tarfile.PAX_FORMAT)).read))


def test_negative_sizes_are_damage() -> None:
    block = bytearray(tarfile.TarInfo("a").tobuf())
    block[124:136] = b"-0000000005\0"
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    with pytest.raises(DatasetError, match="the header at byte 0 is damaged"):
        list(iter_members(io.BytesIO(bytes(block)).read))
