"""Requests and responses: typed and JSON forms say the same; what is malformed is named."""

import base64
import contextlib
import json
import struct
import tracemalloc
import zlib
from io import BytesIO
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from bioptimus.errors import RequestError
from bioptimus.inference import png
from bioptimus.inference.schemas import ModelRequest, ModelResponse
from tests.models import pixels


def png_of(mode: str, **options: Any) -> bytes:
    image = Image.fromarray(pixels(1)).convert(mode)
    file = BytesIO()
    image.save(file, "PNG", **options)
    return file.getvalue()


def body(**changes: Any) -> str:
    values = json.loads(ModelRequest.from_pixels(pixels(1), slide_name="a.svs", x=3).to_json())
    return json.dumps({**values, **changes})


def test_request_survives_json_with_every_field() -> None:
    request = ModelRequest.from_pixels(
        pixels(1),
        slide_name="😐.svs",
        x=12_345,
        y=-1,
        tissue_ratio=0.25,
        patch_idx=7,
        resolution=0.5,
        bulk_rna=[0.0, 1.5, 2e6],
    )
    read = ModelRequest.from_json(request.to_json())
    for name in ("slide_name", "x", "y", "width", "height", "tissue_ratio", "patch_idx"):
        assert getattr(read, name) == getattr(request, name)
    assert read.resolution == 0.5
    assert read.bulk_rna is not None
    assert read.bulk_rna.tolist() == [0.0, 1.5, 2e6]
    assert np.array_equal(read.pixels(), pixels(1))


def test_pixels_in_memory_are_handed_on_and_not_copied() -> None:
    tile = pixels(1)
    assert ModelRequest.from_pixels(tile).pixels() is tile


def test_image_data_is_a_png_that_others_can_read() -> None:
    data = ModelRequest.from_pixels(pixels(2)).image_data
    assert data is not None
    with Image.open(BytesIO(base64.b64decode(data))) as image:
        image.verify()
    with Image.open(BytesIO(base64.b64decode(data))) as image:
        assert np.array_equal(np.asarray(image), pixels(2))


def test_strided_pixels_encode_like_contiguous_ones() -> None:
    big = pixels(3, 40)
    view = big[4:20, 8:24]
    request = ModelRequest.from_json(ModelRequest.from_pixels(view).to_json())
    assert np.array_equal(request.pixels(), view)


@settings(max_examples=40, deadline=None)
@given(width=st.integers(1, 300), height=st.integers(1, 300))
def test_stored_png_keeps_pixels_at_any_size(width: int, height: int) -> None:
    tile = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
    assert np.array_equal(png.decode(png.encode_stored(tile)), tile)


@pytest.mark.parametrize("level", [0, 6])
def test_pngs_of_other_writers_are_read(level: int) -> None:
    decoded = png.decode(png_of("RGB", compress_level=level))
    assert np.array_equal(decoded, pixels(1))
    assert decoded.flags.writeable


def test_opaque_rgba_is_taken_and_transparency_refused() -> None:
    assert np.array_equal(png.decode(png_of("RGBA")), pixels(1))
    image = Image.fromarray(pixels(1)).convert("RGBA")
    image.putpixel((0, 0), (1, 2, 3, 254))
    file = BytesIO()
    image.save(file, "PNG")
    with pytest.raises(RequestError, match="image_data: PNG with transparent pixels"):
        png.decode(file.getvalue())


def test_palette_png_becomes_its_colours() -> None:
    image = Image.fromarray(pixels(1)).convert("P")
    file = BytesIO()
    image.save(file, "PNG")
    assert np.array_equal(png.decode(file.getvalue()), np.asarray(image.convert("RGB")))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (png_of("L"), "greyscale PNG"),
        (png_of("LA"), "greyscale with alpha PNG"),
        (png_of("I;16"), "16-bit greyscale PNG"),
        (png_of("RGB", transparency=(0, 0, 0)), "transparency"),
        (png_of("P", transparency=0), "transparency"),
        (b"", "not a PNG"),
        (b"hello", "not a PNG"),
        (b"\xff\xd8\xff\xe0 jfif", "not a PNG but a JPEG"),
        (png_of("RGB")[:20], "without a header"),
        (png_of("RGB")[:60], "cannot be decoded"),
        (png.encode_stored(pixels(1))[:-30], "cannot be decoded|corrupt|truncated"),
    ],
)
def test_image_that_is_no_8_bit_rgb_png_is_refused_with_its_kind(data: bytes, words: str) -> None:
    request = ModelRequest(image_data=base64.b64encode(data).decode())
    with pytest.raises(RequestError, match=f"image_data: .*({words})"):
        request.pixels()


def png_around(width: int, height: int, stream: bytes) -> bytes:
    """A PNG that claims a size, with any bytes for its pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return png.SIGNATURE + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in ((b"IHDR", header), (b"IDAT", stream), (b"IEND", b""))
    )


def test_decompression_bomb_is_refused_from_its_header() -> None:
    stream = zlib.compress(bytes(1 << 20))
    request = ModelRequest(image_data=base64.b64encode(png_around(10**5, 10**5, stream)).decode())
    with pytest.raises(RequestError, match="100000 x 100000 px; at most"):
        request.pixels()
    request = ModelRequest(image_data=base64.b64encode(png_around(8000, 8000, stream)).decode())
    with pytest.raises(RequestError, match="8000 x 8000 px, the model takes 16 x 16"):
        request.pixels(size=(16, 16))


def test_stream_longer_than_the_header_says_is_refused() -> None:
    with pytest.raises(RequestError, match="corrupt or truncated"):
        png.decode(png_around(2, 2, zlib.compress(bytes(10_000), 0)))


def test_bomb_behind_a_stored_beginning_takes_no_memory() -> None:
    press = zlib.compressobj(9, zlib.DEFLATED, -15)
    rest = press.compress(bytes(1 << 26)) + press.flush()
    stream = b"\x78\x01" + b"\x00\x01\x00\xfe\xff\x00" + rest + bytes(4)
    data = png_around(2, 2, stream)
    tracemalloc.start()
    with pytest.raises(RequestError, match="corrupt or truncated"):
        png.decode(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 22


@settings(max_examples=300, deadline=None)
@given(
    stored=st.booleans(),
    changes=st.lists(st.tuples(st.integers(0, 5_000), st.integers(1, 255)), min_size=1, max_size=4),
)
def test_damaged_png_is_a_request_error_or_pixels_of_its_size(
    stored: bool, changes: list[tuple[int, int]]
) -> None:
    data = bytearray(png.encode_stored(pixels(1)) if stored else png_of("RGB"))
    for place, flip in changes:
        data[place % len(data)] ^= flip
    # Any other exception escapes and fails the test.
    with contextlib.suppress(RequestError):
        assert png.decode(bytes(data)).ndim == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"image_data": 5}, "image_data: must be a base64 string, not int"),
        ({"image_data": None}, "image_data: must not be null"),
        ({"slide_name": 5}, "slide_name: must be a string"),
        ({"slide_name": None}, "slide_name: must not be null"),
        ({"x": "3"}, "x: must be a whole number"),
        ({"x": 1.5}, "x: must be a whole number"),
        ({"x": True}, "x: must be a whole number"),
        ({"x": None}, "x: must not be null"),
        ({"y": [1]}, "y: must be a whole number"),
        ({"y": 2**70}, "y: out of range"),
        ({"y": float("nan")}, "y: must be a whole number"),
        ({"width": 0}, "width: must be at least 1"),
        ({"height": -224}, "height: must be at least 1"),
        ({"patch_idx": {}}, "patch_idx: must be a whole number"),
        ({"tissue_ratio": "0.5"}, "tissue_ratio: must be a number"),
        ({"tissue_ratio": 1.5}, "tissue_ratio: must be from 0 to 1"),
        ({"tissue_ratio": float("nan")}, "tissue_ratio: must be finite"),
        ({"resolution": 0}, "resolution: must be positive"),
        ({"resolution": float("inf")}, "resolution: must be finite"),
        ({"resolution": False}, "resolution: must be a number"),
        ({"bulk_rna": "1,2,3"}, "bulk_rna: must be a list of numbers, not str"),
        ({"bulk_rna": 3}, "bulk_rna: must be a list of numbers, not int"),
        ({"bulk_rna": {"TP53": 1}}, "bulk_rna: must be a list of numbers, not dict"),
        ({"bulk_rna": [1, "2"]}, "bulk_rna: must be a list of numbers"),
        ({"bulk_rna": [1.0, True]}, "bulk_rna: must be a list of numbers"),
        ({"bulk_rna": [1.0, None]}, "bulk_rna: holds null, NaN"),
        ({"bulk_rna": [1.0, float("nan")]}, "bulk_rna: holds null, NaN"),
        ({"bulk_rna": [1e39]}, "bulk_rna: holds null, NaN"),
        ({"bulk_rna": [10**400]}, "bulk_rna: "),
        ({"bulk_rna": [[1.0], [2.0]]}, "bulk_rna: must be a flat list"),
        ({"bulk_rna": [[1.0], 2.0]}, "bulk_rna: must be a list of numbers"),
    ],
)
def test_malformed_field_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=f"^{words}"):
        ModelRequest.from_json(body(**change))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "body: not JSON"),
        ("{", "body: not JSON"),
        ("[" * 100_000, "body: not JSON"),
        (b"\xff\xfe", "body: not JSON"),
        ("[1]", "body: must be a JSON object, not list"),
        ("null", "body: must be a JSON object, not null"),
        ("{}", "image_data: missing"),
        (5, "body: must be a JSON string, not int"),
    ],
)
def test_body_that_is_no_request_is_refused(text: Any, words: str) -> None:
    with pytest.raises(RequestError, match=f"^{words}"):
        ModelRequest.from_json(text)


@pytest.mark.parametrize("data", ["not base64!", "abc", "data:image/png;base64,AAAA", "é"])
def test_image_data_must_be_base64(data: str) -> None:
    with pytest.raises(RequestError, match="image_data: not base64"):
        ModelRequest.from_json(body(image_data=data)).pixels()


def test_optional_fields_may_be_absent_and_unknown_ones_are_ignored() -> None:
    values = json.loads(body(x=12.0, colour="blue"))
    for name in ("bulk_rna", "tissue_ratio", "resolution"):
        del values[name]
    request = ModelRequest.from_json(json.dumps(values))
    assert (request.x, request.bulk_rna, request.tissue_ratio) == (12, None, None)
    assert request.resolution is None


@pytest.mark.parametrize(
    "tile",
    [
        np.zeros((4, 4, 4), np.uint8),
        np.zeros((4, 4), np.uint8),
        np.zeros((4, 4, 3), np.float32),
        np.zeros((0, 4, 3), np.uint8),
        "tile",
    ],
)
def test_pixels_of_another_type_or_shape_are_refused(tile: Any) -> None:
    with pytest.raises(RequestError, match="pixels: must be a uint8 array"):
        ModelRequest.from_pixels(tile)


def test_request_without_an_image_has_no_pixels() -> None:
    with pytest.raises(RequestError, match="image_data: missing"):
        ModelRequest(x=1).pixels()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
def test_response_floats_come_back_bit_for_bit(values: list[float]) -> None:
    output = np.array(values, np.float32)
    sent = ModelResponse(output=output, embedding=output[::-1], slide_name="a", x=5, y=6)
    read = ModelResponse.from_json(sent.to_json())
    assert read.output.dtype == np.float32
    assert read.output.tobytes() == output.tobytes()
    assert read.embedding is not None
    assert read.embedding.tobytes() == output[::-1].tobytes()
    assert (read.slide_name, read.x, read.y, read.finite) == ("a", 5, 6, True)


def test_response_has_an_embedding_in_json_only_where_it_has_one() -> None:
    output = np.zeros(2, np.float32)
    assert "embedding" not in orjson.loads(ModelResponse(output=output).to_json())
    assert ModelResponse.from_json(ModelResponse(output=output).to_json()).embedding is None


def test_response_that_is_not_finite_says_so_in_both_forms() -> None:
    response = ModelResponse(output=np.array([1.0, np.inf], np.float32))
    assert not response.finite
    read = ModelResponse.from_json(response.to_json())
    assert not read.finite
    assert read.output[0] == 1.0
    assert np.isnan(read.output[1])


def test_mask_response_keeps_its_shape() -> None:
    mask = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert np.array_equal(
        ModelResponse.from_json(ModelResponse(output=mask).to_json()).output, mask
    )


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "output: missing"),
        ({"output": "abc"}, "output: must be a list"),
        ({"output": [1], "embedding": ["a"]}, "embedding: must be a list"),
        ({"output": [1], "x": "a"}, "x: must be"),
    ],
)
def test_malformed_response_is_named(values: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        ModelResponse.from_json(json.dumps(values))
