"""Which µm/px wins, and what is said about the others."""

from pathlib import Path
from typing import Any

import pytest

from bioptimus.errors import ResolutionError, UsageError
from bioptimus.io.resolution import (
    MPP_COLUMN,
    Candidate,
    Claims,
    claim_from_description,
    claims_from_properties,
    decide,
    mpp_from_density,
)
from bioptimus.io.wsi import OpenOptions, Slide
from bioptimus.tiles import TileSpec, plan_tiles
from tests import slides

TAG = Candidate(source="tiff.XResolution", mpp=(0.4, 0.4))
ABSURD = Candidate(source="tiff.XResolution", mpp=(352.8, 352.8))


@pytest.mark.parametrize(
    ("claims", "options", "mpp", "source"),
    [
        (Claims(openslide=(0.25, 0.25), fields=(TAG,)), {}, 0.25, "openslide.mpp-x/y"),
        (Claims(openslide=(0.25, 0.25)), {"mpp_override": 0.5}, 0.5, "--mpp-override"),
        (Claims(openslide=(0.25, 0.25)), {"mpp_fallback": 0.5}, 0.25, "openslide.mpp-x/y"),
        (Claims(fields=(TAG,)), {"mpp_fallback": 0.5}, 0.4, "tiff.XResolution"),
        (Claims(objective_power=40), {"mpp_fallback": 0.5}, 0.5, "--mpp-fallback"),
        (Claims(objective_power=40), {}, 0.25, "objective power"),
        (Claims(openslide=(352.8, 352.8), fields=(TAG,)), {}, 0.4, "tiff.XResolution"),
        (Claims(openslide=(352.8, 352.8)), {"mpp_fallback": 0.5}, 0.5, "--mpp-fallback"),
        (Claims(fields=(ABSURD,), objective_power=20), {}, 0.5, "objective power"),
    ],
)
def test_first_plausible_claim_in_order_wins(
    claims: Claims, options: dict[str, Any], mpp: float, source: str
) -> None:
    resolution = decide("a.svs", claims, **options)
    assert resolution.mpp == pytest.approx((mpp, mpp))
    assert resolution.source == source
    assert [entry.source for entry in resolution.candidates if entry.used] == [source]
    assert all(entry.verdict for entry in resolution.candidates)


@pytest.mark.parametrize(("mpp", "is_plausible"), [(0.049, 0), (0.05, 1), (20.0, 1), (20.1, 0)])
def test_plausible_range_ends_where_it_says(mpp: float, is_plausible: int) -> None:
    resolution = decide("a.svs", Claims(openslide=(mpp, mpp)))
    assert (resolution.value is not None) == bool(is_plausible)


def test_implausible_value_is_named_with_its_source() -> None:
    with pytest.raises(ResolutionError, match=r"a\.svs.*352\.8.*openslide\.mpp-x.*--mpp-override"):
        _ = decide("a.svs", Claims(openslide=(352.8, 352.8))).mpp


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 352.8])
@pytest.mark.parametrize("option", ["mpp_override", "mpp_fallback"])
def test_options_outside_the_plausible_range_are_wrong_usage(option: str, value: float) -> None:
    with pytest.raises(UsageError, match="--mpp-"):
        decide("a.svs", Claims(openslide=(0.25, 0.25)), **_named(option, value))


def _named(option: str, value: float) -> dict[str, Any]:
    return {option: value}


def test_an_override_is_told_by_what_the_user_said_it_with() -> None:
    claims = Claims(openslide=(0.25, 0.25))
    resolution = decide("a.svs", claims, mpp_override=0.5, override_source=MPP_COLUMN)
    assert resolution.source == MPP_COLUMN
    (warning,) = resolution.warnings
    assert "0.5 from the list's mpp column contradicts 0.25" in warning


def test_override_that_contradicts_the_file_warns_once() -> None:
    claims = Claims(openslide=(0.25, 0.25), fields=(TAG,), objective_power=40)
    (warning,) = decide("a.svs", claims, mpp_override=0.5).warnings
    assert "0.5 from --mpp-override contradicts 0.25" in warning
    assert decide("a.svs", claims, mpp_override=0.2501).warnings == ()


def test_two_fields_that_contradict_each_other_warn_above_ten_percent() -> None:
    for mpp, words in (((0.25, 0.2749), 0), ((0.25, 0.2751), 1), ((0.2751, 0.25), 1)):
        other = Candidate(source="tag", mpp=mpp)
        warnings = decide("a.svs", Claims(openslide=(0.25, 0.25), fields=(other, other))).warnings
        assert sum("contradicts" in warning for warning in warnings) == words


def test_axes_that_differ_warn_above_two_percent_and_both_are_kept() -> None:
    assert decide("a.svs", Claims(openslide=(0.24253, 0.24265))).warnings == ()
    assert decide("a.svs", Claims(openslide=(0.25, 0.2549))).warnings == ()
    resolution = decide("a.svs", Claims(openslide=(0.25, 0.2551)))
    assert resolution.mpp == (0.25, 0.2551)
    assert "differs between the axes" in resolution.warnings[0]


def test_contradiction_of_mpp_and_objective_power_warns_and_the_mpp_is_used() -> None:
    resolution = decide("a.svs", Claims(openslide=(0.25, 0.25), objective_power=20))
    assert resolution.mpp == (0.25, 0.25)
    assert "objective power 20" in resolution.warnings[0]
    for mpp, power in ((0.25, 40), (0.2205, 40), (0.499, 20), (0.325, 20), (1.0, 10)):
        assert decide("a.svs", Claims(openslide=(mpp, mpp), objective_power=power)).warnings == ()


def test_objective_power_alone_is_a_guess_and_warns() -> None:
    (warning,) = decide("a.svs", Claims(objective_power=40)).warnings
    assert "guess" in warning
    assert "--mpp-override" in warning


@pytest.mark.parametrize(
    ("density", "unit", "mpp"),
    [
        (40000, "centimeter", 0.25),
        (40000, 3, 0.25),
        (101600, "inch", 0.25),
        (101600, "2", 0.25),
        (4000, "millimeter", 0.25),
        (4, 5, 0.25),
        ("40000,0", "CENTIMETER", 0.25),
        (4e9, "km", 0.25),
        (4e6, "m", 0.25),
        (4e6, "meter", 0.25),
        (4e5, "dm", 0.25),
        (4, "\\u00b5m", 0.25),  # as some write the micro sign
        (4, "\u03bcm", 0.25),  # with the Greek letter
        (0.004, "nm", 0.25),
        (0.0004, "Å", 0.25),
        (0.000004, "pm", 0.25),
        (3657600, "yd", 0.25),
        (1219200, "ft", 0.25),
        (25400 / 12 * 4, "li", 0.25),
        (25400 / 72 * 4, "pt", 0.25),
        (101.6, "thou", 0.25),
        (101.6, "mil", 0.25),
        (1, "none", None),
        (1, 1, None),
        (0, "inch", None),
        ("inf", "inch", None),
        ("", "inch", None),
        (None, None, None),
        (72, "inch", 352.777),
    ],
)
def test_every_unit_of_resolution_tags(density: object, unit: object, mpp: float | None) -> None:
    found = mpp_from_density(density, unit)
    assert found == (None if mpp is None else pytest.approx(mpp, rel=1e-5))


def _ome(attributes: str) -> str:
    return (
        '<?xml version="1.0" encoding="UTF-8"?>'
        '<OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06">'
        '<Image ID="Image:1"><Pixels SizeX="10" SizeY="10" PhysicalSizeX="9"/></Image>'
        f'<Image ID="Image:0"><Pixels SizeX="1000" SizeY="900" {attributes}/></Image></OME>'
    )


@pytest.mark.parametrize(
    ("description", "mpp"),
    [
        (_ome('PhysicalSizeX="0.25" PhysicalSizeY="0.26"'), (0.25, 0.26)),
        (_ome('PhysicalSizeX="250" PhysicalSizeXUnit="nm" PhysicalSizeY="0.00025" '
              'PhysicalSizeYUnit="mm"'), (0.25, 0.25)),
        (_ome('PhysicalSizeX="0.25"'), (0.25, 0.25)),
        (_ome('PhysicalSizeX="0.25" PhysicalSizeXUnit="pixel"'), None),
        (_ome(""), None),
        ("Aperio Image Library|AppMag = 40|MPP = 0.2526", (0.2526, 0.2526)),
        ("mpp_x=0.3 mpp_y=0.31", (0.3, 0.31)),
        ("<OME broken", None),
        ("nothing to see", None),
        (None, None),
    ],
)  # fmt: skip
def test_scale_in_an_image_description(
    description: str | None, mpp: tuple[float, float] | None
) -> None:
    found = claim_from_description(description)
    assert (None if found is None else found.mpp) == (None if mpp is None else pytest.approx(mpp))


MEASURES = "dicom.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0].PixelSpacing"


@pytest.mark.parametrize(
    ("properties", "mpp"),
    [
        ({"aperio.MPP": "0,2526"}, (0.2526, 0.2526)),
        ({"philips.DICOM_PIXEL_SPACING": '"0.000227" "0.000226"'}, (0.226, 0.227)),
        ({"dicom.PixelSpacing": "0.0005\\0.00049"}, (0.49, 0.5)),
        ({"dicom.PixelSpacing": "0.0005"}, (0.5, 0.5)),
        ({f"{MEASURES}[0]": "0.0005", f"{MEASURES}[1]": "0.00049"}, (0.49, 0.5)),
        (
            {
                "hamamatsu.PhysicalWidth": "20000000",  # nm
                "hamamatsu.PhysicalHeight": "12000000",
                "openslide.level[0].width": "80000",
                "openslide.level[0].height": "40000",
            },
            (0.25, 0.3),
        ),
        ({"ventana.ScanRes": "0.2325"}, (0.2325, 0.2325)),
        (
            {
                "mirax.LAYER_0_LEVEL_0_SECTION.MICROMETER_PER_PIXEL_X": "0.2425",
                "mirax.LAYER_0_LEVEL_0_SECTION.MICROMETER_PER_PIXEL_Y": "0.2426",
            },
            (0.2425, 0.2426),
        ),
        ({"tiff.XResolution": "40000", "tiff.ResolutionUnit": "centimeter"}, (0.25, 0.25)),
        ({"tiff.XResolution": "101600", "tiff.YResolution": "50800"}, (0.25, 0.5)),  # per inch
        (
            {
                "openslide.vendor": "trestle",
                "tiff.XResolution": "101600",
                "openslide.objective-power": "20",
            },
            (0.5, 0.5),
        ),
        ({"tiff.ImageDescription": "MPP = 0.2526", "openslide.comment": "none"}, (0.2526, 0.2526)),
        ({"openslide.comment": "MPP = 0.2526"}, (0.2526, 0.2526)),
        ({"aperio.AppMag": "20"}, (0.5, 0.5)),
        ({"openslide.mpp-x": "0.25"}, (0.25, 0.25)),
        ({"openslide.mpp-y": "0.25"}, (0.25, 0.25)),
    ],
)
def test_vendor_fields_give_a_scale(properties: dict[str, str], mpp: tuple[float, float]) -> None:
    assert decide("a", claims_from_properties(properties)).mpp == pytest.approx(mpp)


# ---- the same through whole files ----


def test_slide_without_unit_says_before_any_work_which_flag_helps(tmp_path: Path) -> None:
    path = slides.write_pyramid(tmp_path / "no-unit.tif", slides.noise(300, 300), mpp=None)
    with (
        Slide.open(path) as slide,
        pytest.raises(
            ResolutionError,
            match=r"no-unit\.tif.*\(TIFF resolution 1 has no unit of.*--mpp-override",
        ),
    ):
        slide.tile_reader(TileSpec())


def test_odd_mpp_is_never_rounded_to_a_magnification(tmp_path: Path) -> None:
    path = slides.write_pyramid(tmp_path / "a.tif", slides.noise(1200, 1200), mpp=0.265)
    with Slide.open(path) as slide:
        grid = plan_tiles(slide.dimensions, spec=TileSpec(size_px=512, mpp=0.5), mpp=slide.mpp)
        assert grid[1].x == round(0.5 * 512 / 0.265) == 966


def test_two_scales_of_one_nominal_power_give_two_tile_sides(tmp_path: Path) -> None:
    sides = []
    for mpp in (0.25, 0.55):
        path = slides.write_svs(tmp_path / f"{mpp}.svs", slides.tissue(600, 600), mpp=mpp, power=20)
        with Slide.open(path) as slide:
            spec = TileSpec(size_px=224, mpp=0.5 if mpp == 0.25 else 1.0)
            sides.append(plan_tiles(slide.dimensions, spec=spec, mpp=slide.mpp)[0].width)
    assert sides == pytest.approx([448, 224 / 0.55])


def test_72_dpi_is_not_taken_for_a_scale(tmp_path: Path) -> None:
    path = slides.write_pyramid(
        tmp_path / "a.tif", slides.noise(300, 300), mpp=25400 / 72, unit="INCH"
    )
    with Slide.open(path) as slide, pytest.raises(ResolutionError, match=r"352\.778"):
        _ = slide.mpp
    with Slide.open(path, OpenOptions(mpp_fallback=0.5)) as slide:
        assert slide.mpp == (0.5, 0.5)
        assert "352.778" in slide.warnings[0]


def test_each_axis_keeps_its_own_scale_in_a_file(tmp_path: Path) -> None:
    path = slides.write_pyramid(tmp_path / "a.tif", slides.noise(600, 600), mpp=(0.25, 0.3))
    with Slide.open(path) as slide:
        assert slide.mpp == pytest.approx((0.25, 0.3))
        assert "differs between the axes" in slide.warnings[0]
        reader = slide.tile_reader(TileSpec(size_px=100, mpp=0.5))
        assert reader.scale == pytest.approx((2.0, 0.5 / 0.3))


def test_aperio_fields_that_contradict_each_other_warn(tmp_path: Path) -> None:
    path = slides.write_svs(tmp_path / "a.svs", slides.tissue(400, 400), mpp=0.25, power=20)
    with Slide.open(path) as slide:
        assert slide.mpp == (0.25, 0.25)
        assert any("objective power 20" in sentence for sentence in slide.warnings)


def test_real_slide_without_mpp_and_power(shared_slides: Path) -> None:
    path = shared_slides / "aperio" / "jp2k-no-mpp.svs"
    with Slide.open(path) as slide, pytest.raises(ResolutionError, match="no mpp in its metadata"):
        _ = slide.mpp
    with Slide.open(path, OpenOptions(mpp_override=0.5)) as slide:
        assert slide.resolution.source == "--mpp-override"
