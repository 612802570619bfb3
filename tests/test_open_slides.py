"""Opening: odd paths, refused files and the reason given, files that OpenSlide does not read."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from PIL import Image

from bioptimus.errors import SlideOpenError
from bioptimus.io import plain, wsi
from bioptimus.io.wsi import OpenOptions, Slide
from bioptimus.tiles import Tile, TileSpec
from tests import slides


def message(path: Path) -> str:
    """The text of the error that opening a file ends with."""
    with pytest.raises(SlideOpenError) as caught:
        Slide.open(path)
    text = str(caught.value)
    assert path.name in text
    assert ";" in text, "a fact, then the next step"
    return text


# ---- files that cannot be opened: each kind says which it is ----


def test_missing_file_is_told_as_missing(tmp_path: Path) -> None:
    assert "no such file" in message(tmp_path / "a.svs")


def test_link_to_nowhere_is_told_as_such(tmp_path: Path) -> None:
    (tmp_path / "a.svs").symlink_to(tmp_path / "gone.svs")
    assert "gone.svs" in message(tmp_path / "a.svs")


def test_folder_is_told_as_a_folder(tmp_path: Path) -> None:
    assert "a folder" in message(tmp_path)


def test_empty_file_is_told_as_empty(tmp_path: Path) -> None:
    (tmp_path / "a.svs").touch()
    assert "is empty (0 bytes)" in message(tmp_path / "a.svs")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_file_without_permission_is_told_as_such(tmp_path: Path) -> None:
    path = tmp_path / "a.svs"
    path.write_bytes(b"II*\0")
    path.chmod(0)
    assert "permission" in message(path).lower()


@pytest.mark.parametrize("share", [0.02, 0.5, 0.9])
def test_truncated_file_is_told_as_truncated(tmp_path: Path, share: float) -> None:
    path = slides.write_pyramid(tmp_path / "a.tif", slides.noise(700, 700), factors=(1, 2))
    assert "truncated" in message(slides.truncate(path, share=share))


def test_truncated_real_slide_is_told_as_truncated(tmp_path: Path, example_slide: Path) -> None:
    path = tmp_path / "half.svs"
    shutil.copyfile(example_slide, path)
    assert "truncated" in message(slides.truncate(path))


def test_text_under_a_slides_name_is_told_as_no_slide(tmp_path: Path) -> None:
    path = tmp_path / "a.svs"
    path.write_text("slide,label\n")
    assert "not a slide" in message(path)


def test_foreign_format_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.vsi"
    path.write_bytes(b"\x01\x02\x03\x04" * 100)
    assert "Olympus VSI is not supported" in message(path)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("broken/broken.svs", "not a slide"),
        ("broken/bad_ifd_offset.tif", "truncated or damaged"),
        ("broken/unopenable.tiff", "recognised as generic-tiff.*unsupported compression.*52479"),
        ("broken/rgb.tiled.webp.u1.tif", "recognised as generic-tiff.*unsupported compression"),
        ("mirax-broken/CMU-1-Saved-1_16.mrxs", "folder CMU-1-Saved-1_16 .* is missing"),
        ("mirax-broken/Mirax2-Fluorescence-1.mrxs", "MIRAX folder .* damaged or incomplete"),
        ("zeiss-czi/nuc_small_new_red.czi", 'several planes .*"Z"'),
        ("zeiss-czi/DAPI_GFP.czi", 'several planes .*"T"'),
    ],
)
def test_broken_files_tell_their_kind(shared_slides: Path, name: str, words: str) -> None:
    with pytest.raises(SlideOpenError, match=words):
        Slide.open(shared_slides / name)


def test_incomplete_dicom_series_is_told_as_such(tmp_path: Path, shared_slides: Path) -> None:
    folder = shared_slides / "dicom" / "CMU-1-Small-Region"
    smallest = min(folder.glob("*.dcm"), key=lambda file: file.stat().st_size)
    shutil.copyfile(smallest, tmp_path / "a.dcm")
    assert "DICOM series is incomplete" in message(tmp_path / "a.dcm")


def test_size_of_a_dicom_slide_counts_its_series_and_nothing_else(
    tmp_path: Path, shared_slides: Path
) -> None:
    for file in (shared_slides / "dicom" / "boxes").glob("*.dcm"):
        shutil.copyfile(file, tmp_path / file.name)
    shutil.copyfile(shared_slides / "dicom" / "sm_image.dcm", tmp_path / "other.dcm")
    with Slide.open(tmp_path / "boxes_0.dcm") as slide:
        assert {file.name for file in slide.size_files} == {"boxes_0.dcm", "boxes_1.dcm"}
        assert slide.size_bytes == 5502 + 5658


def test_striped_tiff_with_openslide_alone_is_told_as_striped(tmp_path: Path) -> None:
    path = slides.write_pyramid(tmp_path / "a.tif", slides.noise(300, 300), factors=(1,), tile=None)
    with pytest.raises(SlideOpenError, match=r"striped.*--reader openslide"):
        Slide.open(path, OpenOptions(reader="openslide"))


def test_fluorescence_stack_is_refused_with_its_reason(tmp_path: Path) -> None:
    path = tmp_path / "a.ome.tif"
    tifffile.imwrite(path, np.zeros((4, 300, 300), np.uint16), metadata={"axes": "CYX"})
    assert "not read" in message(path)


def test_picture_too_large_to_decode_in_one_piece_is_refused_before_decoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain, "MAX_SEGMENT_BYTES", 100 * 100 * 3)
    path = tmp_path / "a.png"
    Image.fromarray(slides.noise(101, 100)).save(path)
    assert "vips tiffsave" in message(path)


# ---- paths ----


@pytest.mark.parametrize("name", ["with space.svs", "Schnitt für Müller.svs", "切片.svs", "😐.svs"])
def test_any_path_opens(tmp_path: Path, example_slide: Path, name: str) -> None:
    folder = tmp_path / "ordner mit ü"
    folder.mkdir()
    (folder / name).symlink_to(example_slide)
    with Slide.open(folder / name) as slide:
        assert slide.name == name
        assert slide.reader == "tiff"
        slide.tile_reader(TileSpec()).read(Tile(0, 0, 0, 448, 448))


# ---- slides that OpenSlide refuses ----


def whole(slide: Slide) -> slides.Pixels:
    """Every pixel of level 0."""
    return slide.thumbnail(1_000_000).pixels


@pytest.mark.parametrize(
    "name",
    [
        "ome-tiff/XYC-jpeg-pyramid.ome.tiff",
        "ome-tiff/cells.ome.tif",
        "not-a-slide/kidney-48-5.tif",
        "he-patches/kather1.tif",
    ],
)
def test_refused_tiff_has_tifffiles_pixels(shared_slides: Path, name: str) -> None:
    right = tifffile.imread(shared_slides / name)
    if right.shape[0] == 3:
        right = right.transpose(1, 2, 0)
    with Slide.open(shared_slides / name) as slide:
        assert slide.reader == "tifffile"
        np.testing.assert_array_equal(whole(slide), right)


def test_ome_tiff_tells_its_scale(shared_slides: Path) -> None:
    with Slide.open(shared_slides / "ome-tiff" / "cells.ome.tif") as slide:
        assert slide.mpp == pytest.approx((0.25, 0.25))
        assert slide.resolution.source.startswith("OME")


def _write_ome_pyramid(path: Path, pixels: slides.Pixels, **options: Any) -> Path:
    scale = {"PhysicalSizeX": 0.5, "PhysicalSizeY": 0.5}
    with tifffile.TiffWriter(path, ome=True) as writer:
        writer.write(
            pixels, subifds=2, photometric="rgb", metadata={"axes": "YXS", **scale}, **options
        )
        for factor in (2, 4):
            writer.write(slides.half(pixels, factor), subfiletype=1, photometric="rgb", **options)
    return path


@pytest.mark.parametrize(
    ("options", "reader"),
    [
        ({"tile": (256, 256), "compression": "jpeg"}, "tiff"),
        ({"tile": (256, 256), "compression": "deflate"}, "tiff"),
        ({"compression": "deflate", "rowsperstrip": 16}, "tifffile"),
        ({"compression": "lzw", "predictor": True, "rowsperstrip": 7}, "tifffile"),
        ({}, "tifffile"),
    ],
)
def test_ome_pyramid_in_sub_ifds_has_all_its_levels(
    tmp_path: Path, options: dict[str, Any], reader: str
) -> None:
    pixels = slides.tissue(1000, 800)
    path = _write_ome_pyramid(tmp_path / "a.ome.tif", pixels, **options)
    with Slide.open(path) as slide:
        assert slide.reader == reader
        assert slide.level_dimensions == ((1000, 800), (500, 400), (250, 200))
        assert slide.mpp == pytest.approx((0.5, 0.5))
        reader_of_two = slide.tile_reader(TileSpec(size_px=100, mpp=2.0))
        assert reader_of_two.level == 2
        tile = reader_of_two.read(Tile(0, 400, 200, 400, 400))
    difference = np.abs(tile.astype(int) - slides.half(pixels, 4)[50:150, 100:200])
    assert difference.mean() < (6 if options.get("compression") == "jpeg" else 1e-9)


@pytest.mark.parametrize(
    "options",
    [
        {"compression": None, "rowsperstrip": 300},
        {"compression": None, "rowsperstrip": 64},
        {"compression": None, "rowsperstrip": 7},
        {"compression": "deflate", "rowsperstrip": 300},
        {"compression": "packbits", "rowsperstrip": 1},
        {"compression": "jpeg", "rowsperstrip": 16},
        {"compression": None, "planarconfig": "separate", "rowsperstrip": 50},
        {"compression": "lzw", "planarconfig": "separate", "rowsperstrip": 50},
    ],
)
def test_striped_tiff_is_read_whole_and_right(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain, "_RAW_STRIP_BYTES", 10_000)
    pixels = slides.tissue(411, 300)
    stored = pixels
    if options.get("planarconfig") == "separate":
        stored = np.ascontiguousarray(pixels.transpose(2, 0, 1))
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, stored, photometric="rgb", metadata=None, **options)
    with Slide.open(path) as slide:
        assert slide.reader == "tifffile"
        right = tifffile.imread(path)
        np.testing.assert_array_equal(whole(slide), right if right.shape[-1] == 3 else pixels)


@pytest.mark.parametrize(("name", "mode"), [("a.png", "RGB"), ("a.png", "RGBA"), ("a.jpg", "RGB")])
def test_plain_picture_is_a_slide_once_its_scale_is_given(
    tmp_path: Path, name: str, mode: str
) -> None:
    path = tmp_path / name
    Image.fromarray(slides.tissue(500, 400)).convert(mode).save(path)
    with Slide.open(path, OpenOptions(mpp_override=0.5)) as slide:
        assert slide.vendor in ("png", "jpeg")
        tile = slide.tile_reader(TileSpec(size_px=224, mpp=0.5)).read(Tile(0, 224, 0, 224, 224))
    right = np.asarray(Image.open(path).convert("RGB"))[:224, 224:448]
    np.testing.assert_array_equal(tile, right)


def test_turned_tiff_is_read_as_stored_and_warns(shared_slides: Path) -> None:
    path = shared_slides / "generic-tiff" / "test_orient6.tif"
    with Slide.open(path) as slide:
        assert any("orientation 6" in sentence for sentence in slide.warnings)
        with tifffile.TiffFile(path) as tiff:
            stored = tiff.pages[0].asarray()
        np.testing.assert_array_equal(whole(slide)[..., 0], stored)


def test_label_mask_stored_as_a_slide_warns(shared_slides: Path) -> None:
    with Slide.open(shared_slides / "generic-tiff" / "no_dzi.tif") as slide:
        assert any("grey channel" in sentence for sentence in slide.warnings)


def test_single_level_without_pyramid_is_read_in_bounded_memory(tmp_path: Path) -> None:
    """A coarse picture of 144 Mpx must not hold more than a few squares of it."""
    side = 12_000
    path = tmp_path / "big.tif"
    tile = np.full((512, 512, 3), 200, np.uint8)
    across = -(-side // 512)
    tifffile.imwrite(
        path,
        (tile for _ in range(across * across)),
        shape=(side, side, 3),
        dtype=np.uint8,
        tile=(512, 512),
        photometric="rgb",
        compression="deflate",
        resolution=(20000, 20000),
        resolutionunit="CENTIMETER",
        metadata=None,
    )
    script = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from bioptimus.io.wsi import Slide\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "with Slide.open(Path(sys.argv[1])) as slide:\n"
        "    coarse = slide.coarse_image(64.0)\n"
        "    assert slide.warnings and 'one level' in slide.warnings[0], slide.warnings\n"
        "assert (coarse.pixels == 200).all() and (coarse.opaque == 255).all()\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True
    )
    unit = 1 if sys.platform == "darwin" else 1024
    assert int(done.stdout) * unit < 200 << 20  # the level has 432 MB


def test_no_library_prints_by_itself(shared_slides: Path) -> None:
    """Every file of the shared folder, opened and read: stderr of the process stays empty."""
    script = (
        "import logging, sys\n"
        "from pathlib import Path\n"
        "from bioptimus.errors import SlideError\n"
        "from bioptimus.io.wsi import Slide, OpenOptions\n"
        "logging.getLogger('bioptimus').addHandler(logging.NullHandler())\n"
        "opened = 0\n"
        "for path in sorted(Path(sys.argv[1]).rglob('*')):\n"
        "    if not path.is_file() or path.suffix in ('.md', '.dat', '.ini', '.png'):\n"
        "        continue\n"
        "    for reader in ('auto', 'openslide'):\n"
        "        try:\n"
        "            with Slide.open(path, OpenOptions(reader=reader)) as slide:\n"
        "                opened += 1\n"
        "                slide.thumbnail(64)\n"
        "        except SlideError as exc:\n"
        "            pass\n"
        "print(opened)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, str(shared_slides)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    assert int(done.stdout) > 40


def test_unknown_tags_make_no_noise(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = slides.write_pyramid(
        tmp_path / "a.tif",
        slides.noise(300, 300),
        extratags=[(65000, 3, 1, 7, True), (65001, 2, 0, "private", True)],
    )
    with Slide.open(path, OpenOptions(mpp_override=0.5)) as slide:
        slide.thumbnail(100)
    assert capfd.readouterr() == ("", "")


def test_dicom_series_whose_number_begins_another_is_not_taken_for_it(tmp_path: Path) -> None:
    file = tmp_path / "a.dcm"
    file.write_bytes(bytes(128) + b"DICM" + b"UI\x0c\x001.2.3.4.10\x00\x00\x00")
    assert wsi._names(file, b"1.2.3.4.10")
    assert not wsi._names(file, b"1.2.3.4.1")
    assert not wsi._names(file, b"2.3.4.10")
