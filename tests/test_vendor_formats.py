"""Formats of which no slide of a scanner is at hand, on files made to OpenSlide's descriptions."""

import contextlib
import json
import re
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import h5py
import numpy as np
import numpy.typing as npt
import openslide
import pytest
import torch
from PIL import Image

from bioptimus.batch.inputs import find_inputs
from bioptimus.batch.stage import Stager
from bioptimus.errors import SlideOpenError
from bioptimus.io.companions import companions
from bioptimus.io.sources import OpenSlideSource
from bioptimus.io.wsi import OpenOptions, Slide
from bioptimus.planning import PlanOptions, plan_slide
from bioptimus.tiles import Tile, TileSpec, plan_tiles
from bioptimus.view.source import SlidePictures, open_source
from cli.main import main
from tests import vendor_slides
from tests.slides import damage_tile, decode_one_grey_level_off, tile_place, tissue, white
from tests.tiny_models import tiny

Pixels = npt.NDArray[np.uint8]

# What was not scanned, of MIRAX: no white, so that it is seen to be the slide's own colour.
MIRAX_GLASS = (0xE8, 0xF0, 0xF4)
NOT_TAKEN = [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (5, 3), (5, 4)]
SIZE = (1536, 1280)


def specimen() -> Pixels:
    """Tissue on glass: an ellipse in the middle of the slide."""
    pixels = white(*SIZE)
    y, x = np.mgrid[: SIZE[1], : SIZE[0]]
    inside = ((x - SIZE[0] / 2) / 600) ** 2 + ((y - SIZE[1] / 2) / 500) ** 2 < 1
    pixels[inside] = tissue(*SIZE)[inside]
    return pixels


def write_mirax(path: Path) -> Path:
    return vendor_slides.write_mirax(path, specimen(), missing=NOT_TAKEN, glass=MIRAX_GLASS)


def write_philips(path: Path) -> Path:
    # 1400 x 1100: the last tiles of each level are padded, each level's by another part.
    return vendor_slides.write_philips(path, specimen()[:1100, :1400], missing=[(0, 0), (1, 0)])


def write_sakura(path: Path) -> Path:
    return vendor_slides.write_sakura(path, specimen()[:1278, :1534], missing=[(0, 0), (0, 1)])


def write_iscan(path: Path) -> Path:
    """The older kind of Ventana, without overlaps: levels are padded to whole tiles."""
    return vendor_slides.write_ventana(path, specimen(), overlap=(0, 0), joints=False)


# File name, OpenSlide's name, writer.
FORMATS: dict[str, tuple[str, Callable[[Path], Path]]] = {
    "mirax.mrxs": ("mirax", write_mirax),
    "hamamatsu.ndpi": ("hamamatsu", lambda path: vendor_slides.write_ndpi(path, specimen())),
    "philips.tiff": ("philips", write_philips),
    "ventana.bif": ("ventana", lambda path: vendor_slides.write_ventana(path, specimen())),
    "iscan.tif": ("ventana", write_iscan),
    "trestle.tif": ("trestle", lambda path: vendor_slides.write_trestle(path, specimen())),
    "sakura.svslide": ("sakura", write_sakura),
    "two.vms": ("hamamatsu", lambda path: vendor_slides.write_vms(path, specimen())),
}


def result_of(folder: Path, name: str) -> Path:
    return (folder / name).with_suffix(".h5")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One slide of each format, to be left as it is."""
    folder = tmp_path_factory.mktemp("formats")
    for name, (_, write) in FORMATS.items():
        write(folder / name)
    return folder


def openslide_pixels(
    slide: openslide.OpenSlide, corner: tuple[int, int], level: int, side: int
) -> Pixels:
    image = slide.read_region(corner, level, (side, side))
    glass = slide.properties.get("openslide.background-color", "ffffff")
    canvas = Image.new("RGBA", image.size, f"#{glass}")
    canvas.alpha_composite(image)
    return np.asarray(canvas.convert("RGB"))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("level", [0, 1, 2])
def test_every_tile_at_the_scale_of_a_level_is_what_openslide_gives(
    folder: Path, name: str, level: int
) -> None:
    with openslide.OpenSlide(folder / name) as right, Slide.open(folder / name) as slide:
        assert slide.vendor == FORMATS[name][0]
        spec = TileSpec(size_px=224 // 2**level, mpp=0.25 * 2**level)
        tiles = slide.tile_reader(spec)
        assert tiles.level == level
        grid = plan_tiles(slide.dimensions, spec=spec, mpp=slide.mpp)
        assert len(grid) >= 30
        for tile, got in zip(grid, tiles.read_block(list(grid)), strict=True):
            expected = openslide_pixels(right, (tile.x, tile.y), level, spec.size_px)
            # Half-clear pixels, at the seams of MIRAX: PIL rounds them twice.
            np.testing.assert_allclose(np.asarray(got), expected, rtol=0, atol=1.0)


@pytest.mark.parametrize("name", FORMATS)
def test_coarse_picture_shows_the_slide_and_no_padding_of_a_level(folder: Path, name: str) -> None:
    with Slide.open(folder / name) as slide:
        for picture in (slide.coarse_image(8.0), slide.thumbnail(200)):
            shown = picture.pixels.shape[1::-1]
            for length, by, whole in zip(shown, picture.downsample, slide.dimensions, strict=True):
                assert abs(length * by - whole) <= 1.5 * by


@pytest.mark.parametrize("name", ["mirax.mrxs", "ventana.bif", "iscan.tif", "sakura.svslide"])
def test_scale_that_a_format_states_is_not_guessed_from_the_size_of_its_levels(
    folder: Path, name: str
) -> None:
    """Levels end in a part of a pixel or are padded, so their sizes are not to the scale."""
    with Slide.open(folder / name) as slide:
        sizes = slide.level_dimensions
        assert (sizes[0][0] / sizes[2][0], sizes[0][1] / sizes[2][1]) != (4, 4)
        assert slide.level_downsamples[:3] == ((1, 1), (2, 2), (4, 4))


def test_tile_of_a_slide_with_uneven_pixels_covers_the_same_length_along_both_axes(
    tmp_path: Path,
) -> None:
    path = vendor_slides.write_mirax(tmp_path / "a.mrxs", specimen(), mpp=(0.25, 0.26))
    spec = TileSpec(size_px=100, mpp=0.52)
    with openslide.OpenSlide(path) as right, Slide.open(path) as slide:
        grid = plan_tiles(slide.dimensions, spec=spec, mpp=slide.mpp)
        assert grid.tile_level0 == (208, 200)
        for tile in grid:
            got = slide.tile_reader(spec).read(tile)
            # 104 x 100 px of level 1; each of its columns 25 times, then means of 26.
            image = right.read_region((tile.x, tile.y), 1, (104, 100))
            canvas = Image.new("RGBA", image.size, "white")
            canvas.alpha_composite(image)
            fine = np.repeat(np.asarray(canvas.convert("RGB")), 25, axis=1)
            expected = fine.reshape(100, 100, 26, 3).mean(axis=2)
            np.testing.assert_allclose(got, expected, rtol=0, atol=1.6)


@pytest.mark.parametrize("name", ["mirax.mrxs", "philips.tiff"])
@pytest.mark.parametrize("reader", ["auto", "openslide"])
def test_what_was_not_scanned_is_no_tile_even_where_tissue_is_not_looked_for(
    folder: Path, name: str, reader: Literal["auto", "openslide"]
) -> None:
    spec = TileSpec(size_px=128, mpp=0.25)
    path = folder / name
    options = OpenOptions(reader=reader)
    with openslide.OpenSlide(path) as right, Slide.open(path, options) as slide:
        plan = plan_slide(slide, spec=spec, options=PlanOptions(tissue="none"))
        kept = {(int(x), int(y)) for x, y in plan.coords}
        for tile in plan.grid:
            corner = (tile.x, tile.y)
            pixels = np.asarray(right.read_region(corner, 0, (128, 128)))
            scanned = pixels[..., 3].mean() / 255
            # The coarse picture tells to about 32 px, a quarter of these tiles.
            assert scanned > 0.2 if corner in kept else scanned < 0.8
        assert not {(0, 0), (128, 0)} & kept


@pytest.mark.parametrize("moved", [0, -240])
def test_mask_that_counts_from_the_scanned_area_is_told(
    folder: Path, model: Path, tmp_path: Path, moved: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """QuPath counts from there, where a slide tells its bounds."""
    left, right = 250 + moved, 700 + moved
    ring = [[left, 300], [right, 300], [right, 900], [left, 900], [left, 300]]
    mask = tmp_path / "mask.geojson"
    mask.write_text(json.dumps({"type": "Polygon", "coordinates": [ring]}))
    with Slide.open(folder / "mirax.mrxs") as slide:
        assert slide.bounds is not None
        x, _, width, height = slide.bounds
    assert 230 < x < 250
    words = ["--model", str(model), "--tissue", str(mask), "--out", str(tmp_path / "out")]
    assert main(["embed", str(folder / "mirax.mrxs"), *words]) == 0
    told = [line for line in capsys.readouterr().err.splitlines() if "--no-crop" in line]
    if moved:
        assert len(told) == 1
        assert told[0].startswith("mirax.mrxs: 5")
        assert f"outside the scanned area, {width} x {height} px at ({x}, 0)" in told[0]
    else:
        assert told == []


def test_padded_levels_of_a_philips_slide_are_read_fast_and_agree_beyond_their_edge_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "philips.tiff"
    with Slide.open(path, OpenOptions(reader="openslide")) as slow, Slide.open(path) as fast:
        assert (slow.reader, fast.reader) == ("openslide", "tiff")
        assert fast.level_dimensions[1] == (768, 640)
        monkeypatch.setattr(OpenSlideSource, "read", pytest.fail)
        spec = TileSpec(size_px=200, mpp=0.5)
        tile = Tile(0, 2 * 700, 2 * 500, 400, 400)
        got = fast.tile_reader(spec).read(tile)
        monkeypatch.undo()
        np.testing.assert_array_equal(got, slow.tile_reader(spec).read(tile))


def test_reader_is_compared_with_openslide_where_a_sparse_slide_has_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a tile is missing OpenSlide stands in, so there is nothing to compare."""
    missing = [(x, y) for x in range(6) for y in range(5) if (x, y) != (1, 3)]
    path = vendor_slides.write_philips(
        tmp_path / "a.tiff", specimen(), missing=missing, factors=(1,)
    )
    with Slide.open(path) as slide:
        assert slide.reader == "tiff"
    decode_one_grey_level_off(monkeypatch)
    with Slide.open(path) as slide:
        assert slide.reader == "openslide"


def test_tiles_that_view_shows_of_a_slide_with_uneven_pixels_are_those_that_the_model_saw(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = vendor_slides.write_mirax(tmp_path / "a.mrxs", specimen(), mpp=(0.25, 0.29))
    out = tmp_path / "out"
    assert main(["tiles", str(path), "--no-overview"]) == 0
    assert "mpp 0.25 x 0.29 (" in capsys.readouterr().out
    assert main(["embed", str(path), "--model", str(model), "--out", str(out)]) == 0
    result = open_source(out / "tiny" / "a.h5")
    rows = np.arange(len(result))
    with SlidePictures(result, path) as pictures, h5py.File(result.path) as file:
        shown = np.stack(pictures.tiles(rows))
        with torch.inference_mode():
            expected = tiny()(torch.from_numpy(shown))
        np.testing.assert_allclose(file["features"][:], expected.numpy(), atol=1e-4)


# ---- whole runs ----


@pytest.fixture(scope="module")
def results(folder: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `embed` makes of the folder; tiles of 64 px at 0.5 µm/px."""
    out = tmp_path_factory.mktemp("results")
    assert main(["embed", str(folder), "--model", str(model), "--out", str(out)]) == 0
    return out / "tiny"


@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_those_of_openslides_pixels_at_their_coordinates(
    folder: Path, results: Path, name: str
) -> None:
    with h5py.File(result_of(results, name)) as file, openslide.OpenSlide(folder / name) as slide:
        coords, features = file["coords"][:], file["features"][:]
        assert len(coords) >= 40
        tiles = [openslide_pixels(slide, (int(x), int(y)), 1, 64) for x, y in coords]
    with torch.inference_mode():
        expected = tiny()(torch.from_numpy(np.stack(tiles)))
    np.testing.assert_allclose(features, expected.numpy(), atol=2e-3)


@pytest.mark.parametrize("name", FORMATS)
def test_pictures_of_label_and_glass_are_not_in_a_result(results: Path, name: str) -> None:
    with h5py.File(result_of(results, name)) as file:
        thumbnail = file["thumbnail"][:].astype(int)
        assert set(file["failed_tiles"]["reason"][:]) == set()
    for colour in (vendor_slides.LABEL_COLOUR, vendor_slides.MACRO_COLOUR):
        assert np.abs(thumbnail - np.array(colour)).max(axis=2).min() > 60


def damage(slide: Path) -> None:
    """Overwrite one stored image in the middle of level 0."""
    path, marker, kept = slide, b"\xff[\xd0-\xd7]", 2
    if slide.suffix in (".tif", ".tiff", ".bif"):
        lengths = [tile_place(slide, index=index)[1] for index in range(20)]
        damage_tile(slide, index=int(np.argmax(lengths)))
        return
    if slide.suffix == ".svslide":
        with contextlib.closing(sqlite3.connect(slide)) as tables, tables:
            tables.execute("UPDATE Scan SET data = 'no JPEG' WHERE id = 'T;768|512;1;2;0'")
        return
    if slide.suffix == ".mrxs":
        path, marker, kept = slide.with_suffix("") / "Data0000.dat", b"\xff\xd8\xff", 0
    if slide.suffix == ".vms":
        path = slide.with_name("two-1.jpg")
    data = path.read_bytes()
    # A JPEG's beginning, or the data after a restart marker: those of a row of blocks.
    starts = [found.start() for found in re.finditer(marker, data)]
    start = starts[len(starts) // 2] + kept
    path.write_bytes(data[:start] + b"\xff\xd9" * 100 + data[start + 200 :])


@pytest.mark.parametrize("name", FORMATS)
def test_damaged_image_costs_only_the_tiles_that_lie_in_it(
    folder: Path, results: Path, model: Path, tmp_path: Path, name: str
) -> None:
    for file in companions(folder / name):
        copy = tmp_path / file.relative_to(folder)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)
    damaged = Path(shutil.copyfile(folder / name, tmp_path / name))
    damage(damaged)
    words = ["--model", str(model), "--out", str(tmp_path / "out"), "--max-failed-tiles", "0.5"]
    # At the scale of level 0, which is the damaged one.
    assert main(["embed", str(damaged), *words, "--tile-mpp", "0.25", "--min-tissue", "0.9"]) == 0
    with h5py.File(result_of(tmp_path / "out" / "tiny", name)) as file:
        failed = file["failed_tiles"][:]
        assert 1 <= len(failed) < len(file["coords"])
        assert {row["stage"] for row in failed} == {b"read"}
        assert all(b"cannot be decoded" in row["reason"] for row in failed)


# ---- slides of several files ----


def test_pictures_of_a_vms_slide_are_its_own_and_count_for_its_size(folder: Path) -> None:
    inputs = find_inputs([folder])
    assert len(inputs.slides) == len(FORMATS)
    assert all(reason.startswith("companion: ") for _, reason in inputs.skipped)
    files = sorted(folder.glob("two*"))
    assert len(files) == 5
    with Slide.open(folder / "two.vms") as slide:
        assert sorted(slide.size_files) == files
        assert slide.size_bytes == sum(file.stat().st_size for file in files)


def test_trestle_tags_with_um_per_pixel_are_no_contradiction(folder: Path) -> None:
    """Elsewhere these tags have pixels per unit: as such they would mean 10 cm per pixel."""
    with Slide.open(folder / "trestle.tif") as slide:
        assert slide.mpp == (0.25, 0.25)
        assert slide.warnings == []


@pytest.fixture
def mirax(folder: Path, tmp_path: Path) -> Path:
    """A MIRAX slide that a test may damage."""
    shutil.copytree(folder / "mirax", tmp_path / "a")
    return Path(shutil.copyfile(folder / "mirax.mrxs", tmp_path / "a.mrxs"))


def refusal(path: Path) -> str:
    with pytest.raises(SlideOpenError) as caught:
        Slide.open(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ["Slidedat.ini", "Index.dat", "Data0000.dat", "Data0001.dat"])
def test_missing_file_of_a_mirax_folder_is_named(mirax: Path, name: str) -> None:
    (mirax.parent / "a" / name).unlink()
    text = refusal(mirax)
    assert text.startswith("a.mrxs: its MIRAX folder a ")
    assert name in text
    assert "whole folder again" in text


def test_mirax_folder_under_another_name_is_told_as_missing(mirax: Path) -> None:
    (mirax.parent / "a").rename(mirax.parent / "b")
    assert "the folder a that belongs to this MIRAX slide is missing" in refusal(mirax)


def test_mirax_slide_in_capital_letters_is_told_its_name(mirax: Path) -> None:
    assert "rename it to a.mrxs" in refusal(mirax.rename(mirax.parent / "a.MRXS"))


def test_link_to_a_mirax_slide_without_its_folder_tells_what_to_link(mirax: Path) -> None:
    links = mirax.parent / "links"
    links.mkdir()
    (links / "b.mrxs").symlink_to(mirax)
    text = refusal(links / "b.mrxs")
    assert f"a link to {mirax}" in text
    assert "link the folder a as b too" in text
    (links / "b").symlink_to(mirax.parent / "a")
    with Slide.open(links / "b.mrxs") as slide:
        assert slide.vendor == "mirax"


def test_part_of_a_mirax_slide_names_the_slide(mirax: Path) -> None:
    assert f"name {mirax} instead" in refusal(mirax.parent / "a" / "Slidedat.ini")


def test_staged_copy_of_a_mirax_slide_is_read_instead_of_it(mirax: Path, tmp_path: Path) -> None:
    (staged,) = find_inputs([mirax]).slides
    with Slide.open(mirax) as slide:
        facts = (slide.quickhash, slide.size_bytes)
    with Stager(tmp_path / "local", max_gb=1) as stager, stager.staged(staged) as copy:
        assert copy.is_relative_to(tmp_path / "local")
        with Slide.open(copy) as slide:
            shutil.rmtree(mirax.with_suffix(""))
            assert (slide.quickhash, slide.size_bytes) == facts
            slide.tile_reader(TileSpec(size_px=500, mpp=0.25)).read(Tile(0, 300, 300, 500, 500))
            assert [file.name for file in slide.size_files] == [
                *("a.mrxs", "Data0000.dat", "Data0001.dat", "Index.dat", "Slidedat.ini")
            ]


def test_slide_of_the_same_name_and_another_folder_is_another_slide(mirax: Path) -> None:
    """The ``.mrxs`` file itself is a preview: what tells slides apart lies in the folder."""
    before = mirax.read_bytes()
    with Slide.open(mirax) as slide:
        first = slide.quickhash
    mirax.unlink()
    shutil.rmtree(mirax.with_suffix(""))
    vendor_slides.write_mirax(mirax, specimen()[::-1])
    assert mirax.read_bytes() == before
    with Slide.open(mirax) as slide:
        assert slide.quickhash != first
