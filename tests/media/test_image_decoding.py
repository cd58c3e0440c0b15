"""Images of every mode become RGB; damaged and oversized ones are bad samples."""

from __future__ import annotations

import io
import re
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from tests.odd_images import make_16bit_png, make_cmyk_jpeg, make_palette_gif, make_rotated_jpeg
from vlm_stream.errors import BadSampleError
from vlm_stream.media import ImageConfig, MediaLimits, decode_image, probe_image
from vlm_stream.testing import (
    make_grey_jpeg,
    make_jpeg,
    make_palette_png,
    make_png_with_alpha,
)

MAKERS = [
    make_16bit_png,
    make_cmyk_jpeg,
    make_grey_jpeg,
    make_jpeg,
    make_palette_gif,
    make_palette_png,
    make_png_with_alpha,
    make_rotated_jpeg,
]


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("form", [bytes, bytearray, memoryview])
def test_every_mode_becomes_loaded_rgb_of_the_probed_size(make, form):
    data = form(make(48, 80, seed=3))
    image = decode_image(data)
    assert image.mode == "RGB"
    assert probe_image(data) == (48, 80) == (image.height, image.width)
    assert np.asarray(image).std() > 1


def test_rgb_is_not_copied_and_equals_pillow():
    data = make_jpeg(33, 57, seed=1)
    with Image.open(io.BytesIO(data)) as direct:
        assert np.array_equal(np.asarray(decode_image(data)), np.asarray(direct.convert("RGB")))


@pytest.mark.parametrize(("value", "expected"), [(0, 0), (257, 1), (32896, 128), (65535, 255)])
def test_sixteen_bit_grey_is_scaled_not_clipped(value, expected):
    buffer = io.BytesIO()
    Image.fromarray(np.full((4, 5), value, dtype=np.uint16)).save(buffer, "PNG")
    assert set(np.asarray(decode_image(buffer.getvalue())).ravel()) == {expected}


def test_transparency_is_dropped_as_transformers_does():
    data = make_png_with_alpha(20, 30)
    with Image.open(io.BytesIO(data)) as direct:
        assert np.array_equal(np.asarray(decode_image(data)), np.asarray(direct.convert("RGB")))


def test_exif_orientation_is_an_option():
    data = make_rotated_jpeg(40, 60, orientation=6)
    assert decode_image(data).size == (60, 40)
    turned = decode_image(data, ImageConfig(exif_rotate=True))
    assert turned.size == (40, 60)
    assert np.array_equal(np.asarray(turned), np.rot90(np.asarray(decode_image(data)), -1))


def test_paths_are_read_too(tmp_path):
    path = tmp_path / "a.jpg"
    path.write_bytes(make_jpeg(8, 9))
    assert probe_image(path) == probe_image(str(path)) == (8, 9)
    with pytest.raises(BadSampleError, match="There is no image file at") as caught:
        probe_image(tmp_path / "b.jpg")
    assert (caught.value.stage, caught.value.reason) == ("convert", "missing_file")


def test_truncated_file_is_a_bad_sample():
    data = make_jpeg(200, 300)
    with pytest.raises(BadSampleError, match="The image cannot be decoded") as caught:
        decode_image(data[: len(data) // 2])
    assert (caught.value.stage, caught.value.reason) == ("decode", "bad_image")


@pytest.mark.parametrize("data", [b"", b"not an image", b"\x89PNG\r\n\x1a\n broken"])
def test_other_bytes_are_a_bad_sample(data):
    with pytest.raises(BadSampleError, match="The bytes are not an image"):
        decode_image(data)
    with pytest.raises(BadSampleError) as caught:
        probe_image(data)
    assert caught.value.stage == "convert"


def test_large_image_is_refused_before_decoding():
    with pytest.raises(BadSampleError, match="30x20 pixels, more than the limit of 500") as caught:
        decode_image(make_jpeg(20, 30), limits=MediaLimits(image_pixels=500))
    assert caught.value.reason == "image_too_large"


@pytest.mark.parametrize("side", [10_000, 20_000])
def test_bomb_is_a_bad_sample_whatever_pillow_says(side):
    """A PNG header that promises 100 or 400 million pixels: Pillow warns about one and refuses the other."""
    data = bytearray(make_palette_png(4, 4))
    data[16:24] = side.to_bytes(4, "big") * 2
    crc = __import__("zlib").crc32(bytes(data[12:29]))
    data[29:33] = crc.to_bytes(4, "big")
    with pytest.raises(BadSampleError, match=r"too large|more than the limit") as caught:
        decode_image(bytes(data))
    assert caught.value.reason == "image_too_large"


PEAK = """
import resource, sys
from vlm_stream.media import decode_image, probe_image
from vlm_stream.testing import make_jpeg
first = decode_image(make_jpeg(1000, 1000))
data = open(sys.argv[1], "rb").read()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert probe_image(data) == (1000, 1000)
image = decode_image(data)
print(image.size, image.getpixel((5, 5)), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before << 10)
"""


@pytest.mark.parametrize("kind", ["TIFF", "WEBP", "AVIF", "GIF", "PNG"])
def test_of_files_with_many_pictures_the_first_is_decoded(kind, tmp_path):
    """All of them would take 150 MB."""
    pictures = [Image.new("RGB", (1000, 1000), (200, 3 * number, 0)) for number in range(50)]
    options = {"compression": "tiff_deflate"} if kind == "TIFF" else {"lossless": True, "method": 0}
    path = tmp_path / "many"
    chosen = {"quality": 100, "speed": 10} if kind == "AVIF" else options
    pictures[0].save(path, kind, save_all=True, append_images=pictures[1:], **chosen)
    done = subprocess.run([sys.executable, "-c", PEAK, str(path)], capture_output=True, text=True, check=True)
    size, color, peak = re.fullmatch(r"\((.*)\) \((.*)\) (\d+)\n", done.stdout).groups()
    assert size == "1000, 1000"
    assert all(abs(got - put) < 4 for got, put in zip(map(int, color.split(",")), (200, 0, 0), strict=True))
    assert int(peak) < 80 << 20
