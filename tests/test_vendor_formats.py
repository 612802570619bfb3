"""Formats of which no slide of a scanner is at hand, on files made to OpenSlide's descriptions."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import openslide
import pytest
from PIL import Image

from bioptimus.errors import SlideOpenError
from bioptimus.io.wsi import Slide
from bioptimus.tiles import TileSpec, plan_tiles
from tests import vendor_slides
from tests.slides import tissue, white

Pixels = npt.NDArray[np.uint8]
Colour = tuple[int, int, int]

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


# File name, OpenSlide's name, writer.
FORMATS: dict[str, tuple[str, Callable[[Path], Path]]] = {
    "a.mrxs": ("mirax", write_mirax),
    "a.ndpi": ("hamamatsu", lambda path: vendor_slides.write_ndpi(path, specimen())),
    "a.tiff": ("philips", write_philips),
    "a.bif": ("ventana", lambda path: vendor_slides.write_ventana(path, specimen())),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One slide of each format, to be left as it is."""
    folder = tmp_path_factory.mktemp("formats")
    for name, (_, write) in FORMATS.items():
        write(folder / name)
    return folder


def openslide_pixels(
    slide: openslide.OpenSlide, corner: tuple[int, int], level: int, side: int, glass: Colour
) -> Pixels:
    image = slide.read_region(corner, level, (side, side))
    canvas = Image.new("RGBA", image.size, (*glass, 255))
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
            expected = openslide_pixels(
                right, (tile.x, tile.y), level, spec.size_px, slide.background
            )
            # Half-clear pixels, at the seams of MIRAX: PIL rounds them twice.
            np.testing.assert_allclose(np.asarray(got), expected, rtol=0, atol=1.0)


@pytest.mark.parametrize("name", ["a.mrxs", "a.bif"])
def test_scale_that_a_format_states_is_not_guessed_from_the_size_of_its_levels(
    folder: Path, name: str
) -> None:
    """Levels end in a part of a pixel, so their sizes are not to the scale."""
    with Slide.open(folder / name) as slide:
        sizes = slide.level_dimensions
        assert sizes[0][0] / sizes[2][0] != 4
        assert slide.level_downsamples[:3] == ((1, 1), (2, 2), (4, 4))


# ---- slides of several files ----


@pytest.fixture
def mirax(folder: Path, tmp_path: Path) -> Path:
    """A MIRAX slide that a test may damage."""
    shutil.copytree(folder / "a", tmp_path / "a")
    return Path(shutil.copyfile(folder / "a.mrxs", tmp_path / "a.mrxs"))


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
