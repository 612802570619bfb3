"""No reader changes a pixel: whatever reads a slide gives what OpenSlide gives, bit for bit."""

import logging
from pathlib import Path
from typing import Any, Literal

import imagecodecs
import numpy as np
import numpy.typing as npt
import openslide
import pytest
import tifffile

from bioptimus.errors import SlideReadError
from bioptimus.io.wsi import OpenOptions, Slide
from bioptimus.tiles import Tile, TileSpec
from tests import slides

Pixels = npt.NDArray[np.uint8]

READERS: tuple[Literal["auto", "openslide"], ...] = ("auto", "openslide")

# Every slide of the shared folder that OpenSlide opens, and the reader it is to get.
REAL_SLIDES = {
    "aperio/CMU-1-Small-Region.svs": "tiff",
    "aperio/jp2k-no-mpp.svs": "tiff",
    "aperio/small.svs": "tiff",
    "aperio/😐.svs": "tiff",
    "generic-tiff/boxes.tiff": "tiff",
    "generic-tiff/CMU-0-small.tiff": "tiff",
    "generic-tiff/no_dzi.tif": "tiff",
    "generic-tiff/test.tif": "tiff",
    "generic-tiff/rgb.tiled.lzw.u1.tif": "openslide",
    "generic-tiff/gray.tiled.u1.tif": "openslide",
    "generic-tiff/rgb.tiled.zstd.u1.tif": "openslide",
    "leica-scn/leica-made.scn": "openslide",
    "dicom/sm_image.dcm": "openslide",
    "dicom/boxes/boxes_0.dcm": "openslide",
}


def openslide_pixels(path: Path, x: int, y: int, level: int, width: int, height: int) -> Pixels:
    """What OpenSlide and PIL give, on white."""
    with openslide.OpenSlide(path) as slide:
        image = slide.read_region((x, y), level, (width, height))
    from PIL import Image

    canvas = Image.new("RGBA", image.size, (255, 255, 255, 255))
    canvas.alpha_composite(image)
    return np.asarray(canvas.convert("RGB"))


def read_native(slide: Slide, level: int, x: int, y: int, size: int) -> Pixels:
    """A tile at a level's own scale; x and y in that level's pixels."""
    mpp = (0.5, 0.5)
    downsample = slide.level_downsamples[level]
    spec = TileSpec(size_px=size, mpp=mpp[0] * downsample[0])
    tile = Tile(0, round(x * downsample[0]), round(y * downsample[1]), size, size)
    reader = slide.tile_reader(spec)
    assert reader.level == level
    return reader.read(tile)


def assert_level_agrees(path: Path, slide: Slide, level: int) -> None:
    width, height = slide.level_dimensions[level]
    size = 200
    for x, y in (
        (0, 0),
        (max(0, width // 2 - 100), max(0, height // 3)),
        (width - 90, height - 70),
    ):
        x, y = max(0, x), max(0, y)
        downsample = slide.level_downsamples[level][0]
        right = openslide_pixels(
            path, round(x * downsample), round(y * downsample), level, size, size
        )
        np.testing.assert_array_equal(read_native(slide, level, x, y, size), right)


@pytest.mark.parametrize(("name", "reader"), REAL_SLIDES.items())
def test_real_slide_has_openslides_pixels(shared_slides: Path, name: str, reader: str) -> None:
    path = shared_slides / name
    with Slide.open(path, OpenOptions(mpp_override=0.5)) as slide:
        assert slide.reader == reader
        for level, (x, y) in enumerate(slide.level_downsamples):
            if x == y == round(x):  # elsewhere OpenSlide itself interpolates
                assert_level_agrees(path, slide, level)


def test_half_clear_pixels_are_mixed_with_the_background(shared_slides: Path) -> None:
    path = shared_slides / "generic-tiff/rgba.tiled.u1.tif"
    with openslide.OpenSlide(path) as slide:
        rgba = np.asarray(slide.read_region((0, 0), 0, slide.dimensions)).astype(np.float64)
    share = rgba[..., 3:] / 255
    right = rgba[..., :3] * share + 255 * (1 - share)
    with Slide.open(path, OpenOptions(mpp_override=0.5)) as ours:
        tile = read_native(ours, 0, 0, 0, 80)
    assert np.abs(tile - right[:80, :80]).max() <= 1.0 + 1e-9


def _rgb_jpeg_without_marker(path: Path, pixels: Pixels, *, tables: bool) -> Path:
    """As Aperio writes it: RGB in JPEG, component numbers 0, 1, 2, nothing that says so."""
    parts, shared = [], b""
    for y in range(0, pixels.shape[0], 256):
        for x in range(0, pixels.shape[1], 256):
            tile = np.zeros((256, 256, 3), np.uint8)
            piece = pixels[y : y + 256, x : x + 256]
            tile[: piece.shape[0], : piece.shape[1]] = piece
            stream = imagecodecs.jpeg8_encode(
                tile, level=85, colorspace="RGB", outcolorspace="RGB", subsampling="444"
            )
            shared, part = _split_jpeg(bytes(stream))
            parts.append(part if tables else shared[:-2] + part[2:])
    extra: dict[str, Any] = {"jpegtables": shared} if tables else {}
    with tifffile.TiffWriter(path) as writer:
        writer.write(
            iter(parts),
            shape=pixels.shape,
            dtype=np.uint8,
            tile=(256, 256),
            compression="jpeg",
            subsampling=(1, 1),
            photometric="rgb",
            compressionargs={"outcolorspace": 2},
            metadata=None,
            **extra,
        )
    return path


def _split_jpeg(stream: bytes) -> tuple[bytes, bytes]:
    """(tables, picture) of a JPEG, without colour markers and with components 0, 1, 2."""
    tables, rest, at = b"", b"", 2
    while True:
        marker = stream[at + 1]
        length = int.from_bytes(stream[at + 2 : at + 4], "big")
        segment = bytearray(stream[at : at + 2 + length])
        at += 2 + length
        if marker == 0xC0:
            segment[10], segment[13], segment[16] = 0, 1, 2
        if marker == 0xDA:
            segment[5], segment[7], segment[9] = 0, 1, 2
        if marker in (0xDB, 0xC4):
            tables += segment
        elif marker not in (0xE0, 0xEE):
            rest += segment
        if marker == 0xDA:
            return b"\xff\xd8" + tables + b"\xff\xd9", b"\xff\xd8" + rest + stream[at:]


WRITTEN: dict[str, dict[str, Any]] = {
    "ycbcr 4:2:0": {"compression": "jpeg", "subsampling": (2, 2)},
    "ycbcr 4:2:2": {"compression": "jpeg", "subsampling": (2, 1)},
    "ycbcr 4:4:4": {"compression": "jpeg", "subsampling": (1, 1)},
    "bigtiff": {"compression": "jpeg", "bigtiff": True},
    "deflate": {"compression": "deflate"},
    "deflate with predictor": {"compression": "deflate", "predictor": True},
    "lzw": {"compression": "lzw"},
    "uncompressed": {"compression": None},
    "small tiles": {"compression": "jpeg", "tile": 128},
    "dots per inch": {"compression": "jpeg", "unit": "INCH"},
}


@pytest.mark.parametrize("kind", WRITTEN)
def test_written_pyramid_has_openslides_pixels(tmp_path: Path, kind: str) -> None:
    # 1040 x 784: the last column and row of stored tiles are partly empty at every level.
    path = slides.write_pyramid(
        tmp_path / "a.tif", slides.tissue(1040, 784), mpp=0.5, factors=(1, 2, 8), **WRITTEN[kind]
    )
    with Slide.open(path, OpenOptions(mpp_override=0.5)) as slide:
        assert slide.reader == "tiff"
        for level in range(3):
            assert_level_agrees(path, slide, level)


@pytest.mark.parametrize("tables", [True, False])
def test_rgb_jpeg_without_marker_keeps_its_colours(tmp_path: Path, tables: bool) -> None:
    pixels = slides.tissue(700, 500)
    path = _rgb_jpeg_without_marker(tmp_path / "a.tif", pixels, tables=tables)
    with Slide.open(path, OpenOptions(mpp_override=0.5)) as slide:
        assert slide.reader == "tiff"
        assert_level_agrees(path, slide, 0)
        tile = read_native(slide, 0, 0, 0, 224)
    assert np.abs(tile.astype(int) - pixels[:224, :224]).mean() < 6


def test_aperio_look_alike_is_read_fast_and_agrees(tmp_path: Path) -> None:
    path = slides.write_svs(tmp_path / "a.svs", slides.tissue(1100, 900), mpp=0.5)
    with Slide.open(path) as slide:
        assert (slide.vendor, slide.reader) == ("aperio", "tiff")
        assert_level_agrees(path, slide, 0)


def test_openslide_can_be_insisted_on(example_slide: Path) -> None:
    with Slide.open(example_slide, OpenOptions(reader="openslide", mpp_override=0.5)) as slide:
        assert slide.reader == "openslide"
        assert_level_agrees(example_slide, slide, 0)


def test_reader_whose_pixels_differ_is_not_used_and_the_log_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = slides.write_svs(tmp_path / "a.svs", slides.tissue(600, 600), factors=(1,))
    slides.decode_one_grey_level_off(monkeypatch)
    with caplog.at_level(logging.INFO), Slide.open(path) as slide:
        assert slide.reader == "openslide"
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO]
    assert len(lines) == 1
    assert "a.svs" in lines[0]
    assert "OpenSlide" in lines[0]


def test_tile_cut_short_inside_is_an_error_as_it_is_for_openslide(tmp_path: Path) -> None:
    """libjpeg fills the rest with grey and only warns; those are invented pixels."""
    path = slides.write_svs(tmp_path / "a.svs", slides.tissue(1024, 512), mpp=0.5, factors=(1,))
    offset, length = slides.tile_place(path, index=5)
    with path.open("r+b") as file:
        file.seek(offset)
        whole = file.read(length)
        file.seek(offset)
        # Half the data, then an end of image where it belongs and padding after that.
        file.write(whole[: length // 2] + b"\xff\xd9" + b"\0" * 30)
        file.seek(offset + length - 2)
        file.write(b"\xff\xd9")
    for reader in READERS:
        with Slide.open(path, OpenOptions(reader=reader)) as slide:
            tiles = slide.tile_reader(TileSpec(size_px=256, mpp=0.5))
            with pytest.raises(SlideReadError, match=r"a\.svs"):
                tiles.read(Tile(5, 256, 256, 256, 256))


def test_reading_after_close_is_an_error_that_says_so(example_slide: Path) -> None:
    for reader in READERS:
        slide = Slide.open(example_slide, OpenOptions(reader=reader))
        tiles = slide.tile_reader(TileSpec())
        slide.close()
        slide.close()
        with pytest.raises(SlideReadError, match="was closed"):
            tiles.read(Tile(0, 0, 0, 224, 224))


@pytest.mark.parametrize("side", [240, 256, 4096])
@pytest.mark.parametrize("mpp", [8.0, 6.0, 5.6])
def test_coarse_picture_made_of_single_stored_tiles_is_that_of_the_whole_level(
    tmp_path: Path, side: int, mpp: float
) -> None:
    """Factors that divide stored tiles and such that do not, over edges that are not whole."""
    path = slides.write_pyramid(
        tmp_path / "a.tif", slides.noise(4203, 2307), mpp=0.5, factors=(1,), tile=side
    )
    with Slide.open(path) as fast, Slide.open(path, OpenOptions(reader="openslide")) as slow:
        assert (fast.reader, slow.reader) == ("tiff", "openslide")
        for picture, right in (
            (fast.coarse_image(mpp), slow.coarse_image(mpp)),
            (fast.thumbnail(), slow.thumbnail()),
        ):
            assert picture.downsample == right.downsample
            np.testing.assert_array_equal(picture.pixels, right.pixels)
            np.testing.assert_array_equal(picture.opaque, right.opaque)
