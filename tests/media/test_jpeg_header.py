"""The own reader of JPEG headers says what Pillow says, or nothing."""

from __future__ import annotations

import io
import struct
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageCms

from vlm_stream.errors import BadSampleError
from vlm_stream.media import image as image_module
from vlm_stream.media import probe_image
from vlm_stream.media.jpeg_header import read_jpeg_size
from vlm_stream.testing import make_cmyk_jpeg, make_grey_jpeg, make_jpeg, make_rotated_jpeg


def _save(**options: object) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (37, 21), "teal").save(buffer, "JPEG", **options)
    return buffer.getvalue()


PLAIN = {
    "rgb": make_jpeg(48, 80),
    "grey": make_grey_jpeg(48, 80),
    "cmyk": make_cmyk_jpeg(48, 80),
    "progressive": _save(progressive=True),
    "comment": _save(comment=b"by hand"),
    "dpi": _save(dpi=(300, 300)),
    "profile": _save(icc_profile=ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()),
    "large profile": _save(icc_profile=bytes(200_000)),
    "wide tables": _save(qtables=[[300] * 64, [700] * 64]),
    "restarts": _save(restart_marker_rows=1),
}


def _with(*parts: tuple[int, bytes]) -> bytes:
    """A plain file with more segments at its front."""
    segments = b"".join(struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content for marker, content in parts)
    return PLAIN["rgb"][:2] + segments + PLAIN["rgb"][2:]


REFUSED_BY_PILLOW = {
    "short JFIF": _with((0xE0, b"JFIF\0\1")),
    "short Adobe": _with((0xEE, b"Adobe\0")),
    "short profile": _with((0xE2, b"ICC_PROFILE\0\1")),
    "short Photoshop": _with((0xED, b"Photoshop 3.0\0" + b"8BIM\4\4")),
    "short table": _with((0xDB, bytes(64))),
    "two layers": PLAIN["rgb"][:2] + b"\xff\xc0\0\x0e\x08\0\x30\0\x50\2" + bytes(6) + b"\xff\xda\0\2",
    "twelve bits": PLAIN["rgb"][:2] + b"\xff\xc1\0\x0b\x0c\0\x30\0\x50\1" + bytes(3) + b"\xff\xda\0\2",
    "no scan's end": PLAIN["rgb"][: PLAIN["rgb"].index(b"\xff\xda") + 6],
}
LEFT_TO_PILLOW = {
    "two frames": _with((0xC0, b"\x08\0\x01\0\x02\1" + bytes(3))),
    "length of nothing": PLAIN["rgb"][:2] + b"\xff\xfe\0\0" + PLAIN["rgb"][2:],
    "orientation": make_rotated_jpeg(48, 80),
    "padded marker": PLAIN["rgb"][:2] + b"\xff" + PLAIN["rgb"][2:],
    "junk before marker": PLAIN["rgb"][:2] + b"\xff\xfe\0\2junk" + PLAIN["rgb"][2:],
    "no scan": PLAIN["rgb"][: PLAIN["rgb"].index(b"\xff\xda")],
    "png": b"\x89PNG\r\n\x1a\n",
    "empty": b"",
}


def _by_pillow(data: bytes) -> tuple[int, int] | str:
    """What Pillow alone says: the size, or why not; a warning and another format count as a no."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with Image.open(io.BytesIO(data)) as image:
                return (image.height, image.width) if image.format == "JPEG" else f"format {image.format}"
    except Exception as error:
        return repr(error)


@pytest.mark.parametrize("data", PLAIN.values(), ids=PLAIN)
def test_what_encoders_write_needs_no_pillow(data):
    assert read_jpeg_size(data) == _by_pillow(data) == probe_image(data)


@pytest.mark.parametrize("data", LEFT_TO_PILLOW.values(), ids=LEFT_TO_PILLOW)
def test_what_is_not_plain_is_left_to_pillow(data):
    assert read_jpeg_size(data) is None


@pytest.mark.parametrize("data", REFUSED_BY_PILLOW.values(), ids=REFUSED_BY_PILLOW)
def test_what_pillow_refuses_is_refused_with_its_words(data):
    assert isinstance(_by_pillow(data), str)
    assert read_jpeg_size(data) is None
    with pytest.raises(BadSampleError, match="The bytes are not an image"):
        probe_image(data)


def test_a_picture_of_several_is_left_to_pillow():
    buffer = io.BytesIO()
    first, second = Image.new("RGB", (20, 10)), Image.new("RGB", (20, 10), "red")
    first.save(buffer, "MPO", save_all=True, append_images=[second])
    assert read_jpeg_size(buffer.getvalue()) is None
    assert probe_image(buffer.getvalue()) == (10, 20)


@settings(max_examples=400)
@given(data=st.data())
def test_damaged_files_are_read_as_pillow_reads_them(data):
    files = (PLAIN | LEFT_TO_PILLOW | REFUSED_BY_PILLOW).values()
    file = bytearray(data.draw(st.sampled_from(list(files))))
    header = max(file.find(b"\xff\xda") + 16, 1)  # behind it nobody looks
    for place, value in data.draw(st.lists(st.tuples(st.integers(0, header), st.integers(0, 255)), max_size=4)):
        if place < len(file):
            file[place] = value
    cut = data.draw(st.none() | st.integers(0, header))
    _check_against_pillow(bytes(file[:cut]))


_NAMES = (
    *(b"JFIF\0\1\1", b"JFIF", b"Adobe\0\x64", b"Adobe", b"Exif\0\0", b"Exif", b"ICC_PROFILE\0\1\1", b"ICC_PROFILE\0"),
    *(b"MPF\0", b"MPF", b"Photoshop 3.0\0" + b"8BIM\4\4", b"http://ns.adobe.com/xap/1.0/\0", b"FPXR\0", b""),
)
_FRAMES = st.builds(
    lambda bits, height, width, layers, more: struct.pack(">BHHB", bits, height, width, layers) + bytes(more),
    st.sampled_from((8, 8, 8, 12)),
    st.sampled_from((0, 1, 480, 65535)),
    st.sampled_from((0, 1, 640, 65535)),
    st.sampled_from((1, 3, 4, 2)),
    st.sampled_from((3, 9, 12, 8)),
)
_TABLES = st.sampled_from((bytes(65), bytes(130), b"\x10" + bytes(128), bytes(64), bytes(66), b"\x10" + bytes(64), b""))
_SEGMENTS = st.one_of(
    st.tuples(
        st.sampled_from((0xE0, 0xE1, 0xE2, 0xED, 0xEE, 0xE5)),
        st.builds(bytes.__add__, st.sampled_from(_NAMES), st.binary(max_size=20)),
    ),
    st.tuples(st.just(0xDB), _TABLES),
    st.tuples(st.sampled_from((0xC0, 0xC1, 0xC2, 0xC3, 0xC9)), _FRAMES),
    st.tuples(st.sampled_from((0xC4, 0xDD, 0xFE, 0xDC, 0xD0, 0xD8, 0xD9, 0x00, 0x01, 0xFF)), st.binary(max_size=8)),
    st.tuples(st.integers(0, 255), st.binary(max_size=8)),
)


@settings(max_examples=600)
@given(
    segments=st.lists(_SEGMENTS, max_size=6),
    frame=_FRAMES,
    last=st.binary(max_size=12),
    error=st.sampled_from((0, 0, 0, 0, 1, -1, -2)),
    at=st.integers(0, 6),
)
def test_any_segments_are_read_as_pillow_reads_them(segments, frame, last, error, at):
    file = b"\xff\xd8"
    for number, (marker, content) in enumerate([*segments, (0xC0, frame), (0xDA, last)]):
        length = max(len(content) + 2 + (error if number == at else 0), 0)
        file += struct.pack(">BBH", 0xFF, marker, length) + content
    _check_against_pillow(file)


def _check_against_pillow(data: bytes) -> None:
    expected = _by_pillow(data)
    size = read_jpeg_size(data)
    if size is not None and size[0] * size[1] <= image_module._max_pixels():
        assert size == expected
    if isinstance(expected, tuple):
        assert probe_image(data) == expected


def test_pixels_are_counted_as_pillow_counts_them(monkeypatch):
    frame = struct.pack(">BHHB", 8, 9000, 9900, 1) + bytes(3)
    data = b"\xff\xd8\xff\xc0" + struct.pack(">H", len(frame) + 2) + frame + b"\xff\xda\0\2"
    assert probe_image(data) == (9000, 9900)
    with pytest.raises(BadSampleError, match="The image is too large to decode"):
        probe_image(data.replace(struct.pack(">H", 9000), struct.pack(">H", 60_000)))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(BadSampleError, match="The image is too large to decode"):
        probe_image(data)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert probe_image(data) == (9000, 9900)
