"""Colour and transparency: what was not scanned, and colour profiles."""

from pathlib import Path
from typing import Literal

import h5py
import numpy as np
import openslide
import pytest
from PIL import ImageCms

from bioptimus import embed_slide
from bioptimus.errors import SlideOpenError
from bioptimus.inference.results import Result
from bioptimus.io.sources import OpenSlideSource
from bioptimus.io.wsi import OpenOptions, Slide
from bioptimus.jobs import SlideOptions
from bioptimus.planning import PlanOptions
from bioptimus.tiles import Tile, TileSpec, plan_tiles
from bioptimus.verify import verify
from bioptimus.view.source import SlidePictures, source_of
from tests import slides
from tests.tiny_models import save_tiny

SPEC = TileSpec(size_px=224, mpp=0.5)


def _profile() -> bytes:
    """An RGB profile whose red is the blue of sRGB, and its blue the red."""
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    return bytes(srgb.replace(b"rXYZ", b"swap").replace(b"bXYZ", b"rXYZ").replace(b"swap", b"bXYZ"))


# ---- what was not scanned ----


def test_outside_of_the_scan_is_background_and_not_opaque(shared_slides: Path) -> None:
    with Slide.open(shared_slides / "leica-scn" / "leica-made.scn") as slide:
        assert slide.bounds == (800, 1000, 1536, 2048)
        outside = slide.tile_reader(SPEC).read(Tile(0, 100, 100, 224, 224))
        assert (outside == 255).all()
        coarse = slide.coarse_image(8.0)
        scanned = coarse.opaque > 127
        x, y = coarse.downsample
        rows, columns = np.nonzero(scanned)
        # Coordinates count from the slide's corner; the bounds only say where the scan lies.
        assert columns.min() * x == pytest.approx(800, abs=x)
        assert rows.min() * y == pytest.approx(1000, abs=y)
        assert (columns.max() + 1) * x == pytest.approx(800 + 1536, abs=x)
        assert (rows.max() + 1) * y == pytest.approx(1000 + 2048, abs=y)
        assert (coarse.pixels[coarse.opaque == 0] == 255).all()


def test_tile_across_the_border_of_the_scan_has_no_black_pixel(shared_slides: Path) -> None:
    with Slide.open(shared_slides / "leica-scn" / "leica-made.scn") as slide:
        tile = slide.tile_reader(SPEC).read(Tile(0, 700, 1500, 224, 224))
    assert (tile[:, :99] == 255).all()
    assert tile[:, 101:].min() > 30
    assert tile[:, 101:].mean() < 254


def test_same_place_has_the_same_pixels_with_and_without_an_offset(shared_slides: Path) -> None:
    """The slide was made from CMU-1's pixels: one frame, counted from the slide's corner."""
    path = shared_slides / "leica-scn" / "leica-made.scn"
    with openslide.OpenSlide(path) as handle:
        right = np.asarray(handle.read_region((1200, 1600), 0, (224, 224)).convert("RGB"))
    with Slide.open(path) as slide:
        tile = slide.tile_reader(SPEC).read(Tile(0, 1200, 1600, 224, 224))
    np.testing.assert_array_equal(tile, right)


@pytest.mark.parametrize("colour", [(255, 255, 255), (0, 0, 0), (10, 200, 90)])
def test_clear_pixels_take_the_slides_own_background(
    shared_slides: Path, colour: tuple[int, int, int]
) -> None:
    path = shared_slides / "leica-scn" / "leica-made.scn"
    source = OpenSlideSource(path, openslide.OpenSlide(path), colour)
    pixels, opaque = source.read_opaque(0, 780, 1500, 40, 10)
    assert (pixels[:, :20] == colour).all()
    assert (opaque[:, :20] == 0).all()
    assert (opaque[:, 20:] == 255).all()
    source.close()


# ---- colour profiles ----


def test_profile_is_recorded_and_not_applied_unless_asked(tmp_path: Path) -> None:
    pixels = slides.tissue(300, 300)
    path = slides.write_pyramid(
        tmp_path / "a.tif", pixels, mpp=0.5, factors=(1,), iccprofile=_profile()
    )
    with Slide.open(path) as slide:
        assert slide.has_icc
        assert not slide.icc_applied
        tile = slide.tile_reader(SPEC).read(Tile(0, 0, 0, 224, 224))
    np.testing.assert_array_equal(tile, pixels[:224, :224])


@pytest.mark.parametrize("factors", [(1,), (1, 4)])
def test_profile_is_applied_when_asked(tmp_path: Path, factors: tuple[int, ...]) -> None:
    pixels = slides.tissue(1000, 1000)
    path = slides.write_pyramid(
        tmp_path / "a.tif", pixels, mpp=0.5, factors=factors, iccprofile=_profile()
    )
    with Slide.open(path, OpenOptions(icc="srgb")) as slide:
        assert slide.icc_applied
        grid = plan_tiles(slide.dimensions, spec=SPEC, mpp=slide.mpp)
        tile = slide.tile_reader(SPEC).read(grid[6])
    stored = pixels[224:448, 224:448]
    np.testing.assert_allclose(tile, stored[..., ::-1], rtol=0, atol=2)


def test_slide_without_profile_says_that_there_is_nothing_to_apply(tmp_path: Path) -> None:
    path = slides.write_pyramid(tmp_path / "a.tif", slides.tissue(300, 300), mpp=0.5)
    with Slide.open(path, OpenOptions(icc="srgb")) as slide:
        assert not slide.icc_applied
        assert any("no colour profile" in sentence for sentence in slide.warnings)


def test_broken_profile_names_the_option_to_leave_out(tmp_path: Path) -> None:
    path = slides.write_pyramid(
        tmp_path / "a.tif", slides.tissue(300, 300), mpp=0.5, iccprofile=b"no profile" * 20
    )
    with Slide.open(path) as slide:
        assert slide.has_icc
    with pytest.raises(SlideOpenError, match=r"a\.tif.*--icc srgb"):
        Slide.open(path, OpenOptions(icc="srgb"))


def test_file_says_what_was_done_with_the_profile_not_what_was_asked_for(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "tiny.pt2")
    options = SlideOptions(
        opening=OpenOptions(icc="srgb"), plan=PlanOptions(tissue="none", min_tissue=0.0)
    )
    pixels = slides.tissue(300, 300)
    for name, profile in (("with", _profile()), ("without", None)):
        slides.write_pyramid(
            tmp_path / f"{name}.tif", pixels, mpp=0.5, factors=(1,), iccprofile=profile
        )

    def embed(name: str) -> Result:
        slide = tmp_path / f"{name}.tif"
        return embed_slide(slide, out=tmp_path / "out", model=model, options=options)

    assert embed("with").attributes["icc"] == "srgb"
    made = embed("without")
    assert made.attributes["icc"] == "none"
    assert not made.attributes["slide_has_icc"]
    assert made.attributes["digest_parameters"]["icc"] == "srgb"
    assert verify(tmp_path / "out").findings == ()

    # As earlier versions wrote it: still whole, still done.
    with h5py.File(made.path, "r+") as file:
        file.attrs["icc"] = "srgb"
    before = made.path.stat().st_mtime_ns
    assert verify(tmp_path / "out").findings == ()
    assert embed("without").path.stat().st_mtime_ns == before


def test_crops_of_a_picture_have_the_colours_that_the_model_saw(
    tmp_path: Path,
) -> None:
    path = slides.write_pyramid(
        tmp_path / "a.tif", slides.tissue(300, 300), mpp=0.5, factors=(1,),
        iccprofile=_profile(),
    )  # fmt: skip
    model = save_tiny(tmp_path / "tiny.pt2")
    crops = {}
    icc: Literal["none", "srgb"]
    for icc in ("none", "srgb"):
        opening = OpenOptions(icc=icc)
        options = SlideOptions(opening=opening, plan=PlanOptions(tissue="none", min_tissue=0.0))
        result = embed_slide(path, out=tmp_path / icc, model=model, options=options)
        with SlidePictures(source_of(result), path) as pictures:
            (crops[icc],) = pictures.tiles(np.array([0]))
        with Slide.open(path, opening) as slide:
            reader = slide.tile_reader(result.tile)
            seen = reader.read(Tile(0, 0, 0, *result.tile_level0))
        np.testing.assert_array_equal(crops[icc], seen)
    assert (crops["none"] != crops["srgb"]).any()
