"""Pictures of a result file, drawn from real files and looked at by their pixels."""

import io
import json
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import h5py
import numpy as np
import numpy.typing as npt
import pytest
from matplotlib.figure import Figure
from PIL import Image
from typer.testing import CliRunner

import bioptimus
from bioptimus.errors import OutputError, UsageError
from bioptimus.tiles import TileSpec
from bioptimus.view import figures
from bioptimus.view.colours import FAILED_COLOUR, hex_to_rgb
from bioptimus.view.drawing import Drawing
from bioptimus.view.figures import cosine_similarity, fit_cohort
from bioptimus.view.page import PictureOptions
from bioptimus.view.scales import Scale, ScaleFit
from bioptimus.view.source import SlidePictures, SlideResult, open_source
from bioptimus.view.wanted import Fitted, Wanted, fit_colours, plan_sheets
from cli.main import app, main
from tests.result_files import Sample, damage, make_result, sample_slide, write_result

SMALL = PictureOptions(width_px=600)


@pytest.fixture(scope="module")
def sample() -> Sample:
    root = Path(__file__).resolve().parent.parent
    slide = root / "examples" / "CMU-1-Small-Region.svs"
    return sample_slide(slide, tile=TileSpec(size_px=112), fail=2)


@pytest.fixture
def result_file(sample: Sample, tmp_path: Path) -> Path:
    return write_result(tmp_path / "in" / "slide.h5", sample)


def changed(sample: Sample, **changes: Any) -> Sample:
    return replace(sample, **changes)


def empty(sample: Sample) -> Sample:
    return changed(
        sample,
        coords=np.zeros((0, 2), np.int64),
        features=np.zeros((0, 21), np.float32),
        predictions=np.zeros((0, 3), np.float32),
        failed=np.zeros((0, 2), np.int64),
    )


def pixels_of(path: Path) -> npt.NDArray[np.int64]:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB")).astype(np.int64)


def pixels_near(picture: npt.NDArray[np.int64], colour: str) -> int:
    return int((np.abs(picture - hex_to_rgb(colour)).max(axis=2) < 12).sum())


def drawn(result: SlideResult, path: Path, kind: str, **options: object) -> Path:
    figure = getattr(figures, f"draw_{kind}")(result, SMALL, **options)
    figures.save(figure, path, SMALL)
    return path


def test_without_a_choice_the_overview_and_the_embedding_map_are_drawn(
    result_file: Path, tmp_path: Path
) -> None:
    done = CliRunner().invoke(
        app, ["view", str(result_file), "--out", str(tmp_path / "out"), "--width-px", "600"]
    )
    assert done.exit_code == 0, done.output
    paths = [Path(line) for line in done.stdout.splitlines()]
    assert [path.name for path in paths] == ["slide.overview.png", "slide.embedding.png"]
    for path in paths:
        assert pixels_of(path).shape[1] == 600


def test_failed_tiles_are_marked(sample: Sample, result_file: Path, tmp_path: Path) -> None:
    with_marks = drawn(open_source(result_file), tmp_path / "a.png", "overview")
    none = changed(sample, failed=np.zeros((0, 2), np.int64))
    without = drawn(
        open_source(write_result(tmp_path / "none.h5", none)), tmp_path / "b.png", "overview"
    )
    assert pixels_near(pixels_of(with_marks), FAILED_COLOUR) > 10
    assert pixels_near(pixels_of(without), FAILED_COLOUR) == 0


def test_a_picture_is_the_same_each_time(result_file: Path, tmp_path: Path) -> None:
    for suffix in ("png", "svg", "pdf"):
        paths = [
            drawn(open_source(result_file), tmp_path / f"{turn}.{suffix}", "embedding")
            for turn in range(2)
        ]
        assert paths[0].read_bytes() == paths[1].read_bytes(), suffix


def test_svg_keeps_its_words_as_text(result_file: Path, tmp_path: Path) -> None:
    path = drawn(
        open_source(result_file), tmp_path / "a.svg", "prediction", column="haematoxylin_od"
    )
    words = "".join(ElementTree.parse(path).getroot().itertext())
    assert "haematoxylin_od" in words
    assert "optical density" in words, "the colour bar names the unit"
    assert "0.2 mm" in words, "the scale bar names its length"


def test_scale_bar_is_as_long_as_it_says_and_lies_below_the_map(result_file: Path) -> None:
    figure = figures.draw_overview(open_source(result_file), SMALL)
    (bar,) = (axes for axes in figure.axes if any(t.get_text().endswith(" mm") for t in axes.texts))
    length_um = float(bar.texts[0].get_text().removesuffix(" mm")) * 1000
    shown = figure.axes[0]
    shown.apply_aspect()
    corners = shown.transData.transform([(0, 0), (length_um / 0.499, 0)])
    assert bar.bbox.width == pytest.approx(corners[1, 0] - corners[0, 0], rel=1e-6)
    assert bar.bbox.width / figure.dpi > 0.5
    below = shown.get_position().y0
    assert below - 0.1 < bar.get_position().y1 < below


def test_heatmap_colours_follow_the_values(result_file: Path) -> None:
    result = open_source(result_file)
    figure = figures.draw_prediction(result, SMALL, column="brightness")
    image = figure.axes[0].images[-1]
    shown: npt.NDArray[np.float32] = np.ma.getdata(np.ma.asarray(image.get_array()))
    lattice = result.lattice()
    np.testing.assert_array_equal(shown[lattice.rows, lattice.columns], result.column("brightness"))
    low, high = image.get_clim()
    assert low == pytest.approx(np.percentile(result.column("brightness"), 1))
    assert high == pytest.approx(np.percentile(result.column("brightness"), 99))


def test_equal_features_have_equal_colours_on_every_slide_of_a_cohort(
    sample: Sample, tmp_path: Path
) -> None:
    assert sample.features is not None
    half = len(sample.coords) // 2
    parts = [slice(0, half), slice(half // 2, None)]
    results = [
        open_source(
            write_result(
                tmp_path / f"{number}.h5",
                changed(
                    sample,
                    coords=sample.coords[part],
                    features=sample.features[part],
                    predictions=None,
                ),
            )
        )
        for number, part in enumerate(parts)
    ]
    fitted = fit_cohort(results, tiles=sum(map(len, results)))
    rasters = []
    for result in results:
        figure = figures.draw_embedding(result, SMALL, fitted=fitted)
        lattice = result.lattice()
        raster = np.asarray(figure.axes[0].images[-1].get_array())
        rasters.append(raster[lattice.rows, lattice.columns, :3])
    shared = half - half // 2
    np.testing.assert_array_equal(rasters[0][half // 2 :], rasters[1][:shared])


def test_a_cohort_of_two_models_is_refused(sample: Sample, tmp_path: Path) -> None:
    assert sample.features is not None
    other = changed(sample, features=sample.features[:, :9])
    results = [
        open_source(write_result(tmp_path / f"{number}.h5", each))
        for number, each in enumerate((sample, other))
    ]
    with pytest.raises(UsageError, match="use the files of one model"):
        fit_cohort(results, tiles=sum(map(len, results)))
    with pytest.raises(UsageError, match="use the files of one model"):
        figures.draw_embedding(
            results[1], SMALL, fitted=fit_cohort(results[:1], tiles=len(results[0]))
        )


def test_of_a_cohort_two_files_at_most_are_in_memory(
    sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        write_result(tmp_path / "cohort" / f"{number}.h5", sample)
    opened: list[weakref.ref[SlideResult]] = []

    def opening(path: Path) -> SlideResult:
        assert sum(ref() is not None for ref in opened) < 2
        source = open_source(path)
        opened.append(weakref.ref(source))
        return source

    monkeypatch.setattr("bioptimus.view.wanted.open_source", opening)
    words = ["view", str(tmp_path / "cohort" / "0.h5"), "--embedding", "--no-slide"]
    assert main([*words, "--fit-on", str(tmp_path), "--out", str(tmp_path)]) == 0
    # Before it is drawn it is looked at, and then the five for their colours.
    assert len(opened) == 1 + 5 + 1
    opened.clear()
    assert main([*words, "--column", "0", "--fit-on", str(tmp_path), "--out", str(tmp_path)]) == 0
    assert len(opened) == 1 + 5 + 5 + 1


def test_results_of_one_name_are_refused_before_the_first_picture(
    sample: Sample, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = (write_result(tmp_path / each / "s.h5", sample) for each in ("a", "b"))
    code, err = view(capsys, one, other, "--no-slide", "--out", tmp_path / "out")
    assert code == 2
    assert err == (
        f"error: {one} and {other} would both become {tmp_path}/out/s.overview.png; give the "
        "folder above both, or draw them into separate folders\n"
    )
    assert not (tmp_path / "out").exists()


def test_below_a_folder_each_result_keeps_its_own(
    sample: Sample, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for each in ("a", "b"):
        write_result(tmp_path / "in" / each / "s.h5", sample)
    for given in ("in", "i*"):
        words = ["view", str(tmp_path / given), "--overview", "--no-slide", "--width-px", "300"]
        assert main([*words, "--out", str(tmp_path / "out")]) == 0
    below = {"in": "", "i*": "in/"}
    wanted = [
        f"{tmp_path}/out/{below[given]}{each}/s.overview.png"
        for given in ("in", "i*")
        for each in ("a", "b")
    ]
    assert capsys.readouterr().out.splitlines() == wanted
    assert sorted(map(str, (tmp_path / "out").rglob("*.png"))) == sorted(wanted)


def test_a_result_given_twice_is_drawn_once(
    result_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same = (result_file, result_file.parent, f"{result_file.parent}/s*.h5")
    assert view(capsys, *same, "--overview", "--no-slide", "--out", tmp_path) == (0, "")


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_a_picture_of_another_result_stays_until_told_otherwise(
    sample: Sample, tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str
) -> None:
    one = write_result(tmp_path / "a" / "s.h5", sample)
    other = write_result(tmp_path / "b" / "s.h5", changed(sample, slide=Path("other.svs")))
    words: list[str | Path] = ["--no-slide", "--out", tmp_path, "--format", suffix]
    assert view(capsys, one, *words, "--embedding") == (0, "")
    picture = tmp_path / f"s.embedding.{suffix}"
    before = picture.read_bytes()
    code, err = view(capsys, other, *words)
    assert code == 2
    assert err == (
        f"error: {picture}: is there already, and not known to be a picture of {other}; pass "
        "--overwrite, or choose another --out\n"
    )
    assert picture.read_bytes() == before
    assert not (tmp_path / f"s.overview.{suffix}").exists(), "nothing is drawn before it is known"
    assert view(capsys, one, *words, "--embedding") == (0, ""), "its own is drawn anew"
    assert picture.read_bytes() == before
    assert view(capsys, other, *words, "--embedding", "--overwrite") == (0, "")
    assert picture.read_bytes() != before


def test_two_values_that_would_become_one_picture_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_result(tmp_path / "a.h5", output_names=("x/y", "x:y", "overview"))
    out = ["--no-slide", "--out", str(tmp_path / "out")]
    for words in (["--column", "x/y", "--column", "x:y"], ["--overview", "--column", "overview"]):
        code, err = view(capsys, path, *out, *words)
        assert code == 2
        assert "two pictures of it would become" in err
        assert not (tmp_path / "out").exists()
    assert view(capsys, path, *out, "--column", "x/y", "--column", "x/y") == (0, "")


@pytest.mark.parametrize("fit_on", [False, True])
def test_results_drawn_together_share_the_colours_of_their_model_fitted_once(
    sample: Sample,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    fit_on: bool,
) -> None:
    assert sample.features is not None
    half = len(sample.coords) // 2
    for number, rows in enumerate((slice(0, half), slice(half, None))):
        part = changed(
            sample,
            coords=sample.coords[rows],
            features=sample.features[rows],
            predictions=None,
        )
        write_result(tmp_path / "in" / f"{number}.h5", part)
        narrow = changed(part, features=part.features[:, :9] if part.features is not None else None)
        write_result(tmp_path / "in" / f"narrow{number}.h5", narrow)
    write_result(tmp_path / "in" / "empty.h5", empty(sample))
    fits: list[object] = []
    used: list[object] = []
    fit = figures.fit_cohort

    def fitting(results: Any, *, tiles: int) -> Any:
        assert tiles == len(sample.coords)
        fits.append(fit(results, tiles=tiles))
        return fits[-1]

    def drawing(result: Any, options: Any, *, fitted: Any) -> Any:
        used.append(fitted)
        return Figure(figsize=(1, 1))

    monkeypatch.setattr(figures, "fit_cohort", fitting)
    monkeypatch.setattr(figures, "draw_embedding", drawing)
    words: list[str | Path] = ["--embedding", "--no-slide", "--out", tmp_path / "out"]
    if fit_on:
        words += ["--fit-on", tmp_path / "in"]
    assert view(capsys, tmp_path / "in", *words) == (0, "")
    wide, narrow_fit = fits
    assert used == [wide, wide, None, narrow_fit, narrow_fit]


def with_values(sample: Sample, path: Path, factor: float) -> Path:
    """A result whose predictions are another's times a factor."""
    assert sample.predictions is not None
    return write_result(path, changed(sample, predictions=sample.predictions * np.float32(factor)))


def spans(capsys: pytest.CaptureFixture[str], *words: str | Path) -> list[tuple[float, float]]:
    """What the colours of the heatmaps span that a command draws, in order."""
    found: list[tuple[float, float]] = []
    save = figures.save

    def looking(figure: Figure, *rest: Any, **options: Any) -> None:
        found.append(figure.axes[0].images[-1].get_clim())
        save(figure, *rest, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "save", looking)
        assert view(capsys, *words, "--no-slide") == (0, "")
    return found


def test_heatmaps_drawn_together_span_the_values_of_all_their_slides(
    sample: Sample, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, factor in (("a", 1.0), ("b", 3.0)):
        with_values(sample, tmp_path / "in" / f"{name}.h5", factor)
    write_result(tmp_path / "in" / "empty.h5", empty(sample))
    out: list[str | Path] = ["--out", tmp_path / "out", "--column", "saturation"]
    drawn_together = spans(capsys, tmp_path / "in" / "a.h5", tmp_path / "in" / "b.h5", *out)
    assert sample.predictions is not None
    values = sample.predictions[:, 1]
    wanted = tuple(np.percentile(np.concatenate([values, 3 * values]), (1, 99)))
    assert drawn_together == [pytest.approx(wanted)] * 2
    alone = spans(capsys, tmp_path / "in" / "a.h5", *out)
    assert alone == [pytest.approx(tuple(np.percentile(values, (1, 99))))]
    fitted = spans(capsys, tmp_path / "in" / "a.h5", *out, "--fit-on", tmp_path / "in")
    assert fitted == [pytest.approx(wanted)]


def test_a_value_asked_for_by_name_and_number_is_of_one_slide_still(
    sample: Sample, tmp_path: Path
) -> None:
    path = with_values(sample, tmp_path / "a.h5", 1.0)
    wanted = Wanted(columns=("saturation", "1"))
    (sheet,) = plan_sheets({path: Path("a.h5")}, wanted, out=tmp_path, suffix="png")
    assert fit_colours([sheet], wanted) == Fitted()


def test_values_of_two_models_have_scales_of_their_own(
    sample: Sample, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = with_values(sample, tmp_path / "a.h5", 1.0)
    other = with_values(sample, tmp_path / "b.h5", 3.0)
    with h5py.File(other, "r+") as file:
        of_model = json.loads(file.attrs["model_spec"]) | {"name": "another"}
        file.attrs["model_spec"] = json.dumps(of_model)
    first, second = spans(capsys, one, other, "--column", "0", "--out", tmp_path / "out")
    assert second == pytest.approx((3 * first[0], 3 * first[1]))
    words: list[str | Path] = ["--fit-on", tmp_path / "fit", "--out", tmp_path / "out"]
    with_values(sample, tmp_path / "fit" / "a.h5", 1.0)
    code, err = view(capsys, other, "--column", "0", "--no-slide", *words)
    assert code == 2
    assert "holds no predictions brightness of model another, as b.h5 does" in err


def test_a_heatmap_says_whose_values_its_colours_span(result_file: Path) -> None:
    for scale, words in (
        (None, "scale of this slide alone"),
        (Scale(low=0, high=1, slides=12), "scale of 12 slides"),
    ):
        figure = figures.draw_prediction(
            open_source(result_file), SMALL, column="brightness", scale=scale
        )
        assert any(text.get_text().endswith(f"\n{words}") for text in figure.texts)


def test_the_scale_of_many_values_is_that_of_evenly_spaced_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bioptimus.view.scales._MOST_VALUES", 2000)
    random = np.random.default_rng(3)
    slides = [random.normal(mean, 1, 1501).astype(np.float32) for mean in range(10)]
    fit = ScaleFit()
    for values in slides:
        fit.add(values)
        assert sum(map(len, fit._held)) <= 2000
    scale = fit.scale()
    assert scale is not None
    whole = Scale.of(np.concatenate(slides), slides=10)
    assert scale.slides == 10
    assert (scale.low, scale.high) == pytest.approx((whole.low, whole.high), abs=0.3)


def test_a_damaged_result_of_a_cohort_is_told_and_left_out_of_the_scale(
    sample: Sample, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = with_values(sample, tmp_path / "a.h5", 1.0)
    damage(with_values(sample, tmp_path / "fit" / "b.h5", 3.0), "predictions", row=5)
    with_values(sample, tmp_path / "fit" / "c.h5", 1.0)
    words: list[str | Path] = ["--column", "0", "--fit-on", tmp_path / "fit", "--no-slide"]
    code, err = view(capsys, one, *words, "--out", tmp_path / "out")
    assert code == 0
    assert err.startswith(f"WARNING: {tmp_path}/fit/b.h5: has other values in row 5")
    assert err.endswith("; colours are fitted without it\n")


def test_colours_of_another_model_are_refused_before_the_first_picture(
    sample: Sample, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sample.features is not None
    write_result(tmp_path / "fit" / "a.h5", changed(sample, features=sample.features[:, :9]))
    path = write_result(tmp_path / "a.h5", sample)
    words: list[str | Path] = [
        "--fit-on",
        tmp_path / "fit",
        "--no-slide",
        "--out",
        tmp_path / "out",
    ]
    code, err = view(capsys, path, *words)
    assert code == 2
    assert "holds no embeddings of 27 values of model lite0, as a.h5 does" in err
    assert not (tmp_path / "out").exists()


def test_a_result_that_cannot_be_drawn_does_not_stop_the_others(
    sample: Sample, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b", "c"):
        write_result(tmp_path / "in" / f"{name}.h5", sample)
    damage(tmp_path / "in" / "a.h5", "features", row=5)
    (tmp_path / "in" / "b.h5").write_bytes(b"text")
    out = tmp_path / "out"
    assert main(["view", str(tmp_path / "in"), "--embedding", "--no-slide", "--out", str(out)]) == 1
    said = capsys.readouterr()
    assert said.out == f"{out}/c.embedding.png\n"
    errors = [line for line in said.err.splitlines() if line.startswith("error: ")]
    assert [f"{name}.h5" in line for name, line in zip("ab", errors, strict=True)] == [True, True]


@pytest.mark.parametrize(
    ("words", "value"),
    [(["--slide", __file__], __file__), (["--tile", "0"], "0"), (["--at", "1,2"], "1,2")],
)
def test_what_is_for_one_result_is_refused_for_several(
    sample: Sample,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    value: str,
) -> None:
    for name in ("a", "b"):
        write_result(tmp_path / f"{name}.h5", sample)
    code, err = view(capsys, tmp_path, *words, "--out", tmp_path / "out")
    assert code == 2
    assert err == f"error: {words[0]} {value}: is for one result, not for 2\n"


def test_an_end_while_a_picture_is_written_leaves_the_old_one(
    result_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = drawn(open_source(result_file), tmp_path / "out.png", "overview")
    before = path.read_bytes()
    render = figures.render

    def ended(figure: Any, target: Any, **options: Any) -> None:
        render(figure, target, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(figures, "render", ended)
    with pytest.raises(KeyboardInterrupt):
        drawn(open_source(result_file), path, "embedding")
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir() if each.is_file()] == ["out.png"]


def test_the_nearest_tiles_are_those_of_highest_cosine(sample: Sample, result_file: Path) -> None:
    assert sample.features is not None
    found = cosine_similarity(open_source(result_file), 5)
    unit = sample.features / np.linalg.norm(sample.features, axis=1, keepdims=True)
    np.testing.assert_allclose(found, unit @ unit[5], atol=1e-5)
    figure = figures.draw_nearest(open_source(result_file), SMALL, row=5, count=4)
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    order = np.argsort(-(unit @ unit[5]))
    assert titles[0] == "tile 5"
    assert [int(title.split(" · ")[0]) for title in titles[1:]] == order[1:5].tolist()


def test_at_finds_the_tile_that_holds_the_point(sample: Sample, result_file: Path) -> None:
    result = open_source(result_file)
    for row in (0, 17, len(result) - 1):
        x, y = sample.coords[row]
        assert result.tile_at((x + 3, y + 3)) == row


def test_at_a_point_without_a_tile_names_the_nearest(result_file: Path) -> None:
    """Glass has no tile: what is like another one is no answer."""
    result = open_source(result_file)
    side = result.tile_level0[0]
    x, y = np.meshgrid(np.arange(0, 2220, 60), np.arange(0, 2967, 60))
    spots = np.stack([x.ravel(), y.ravel()], axis=1)
    away = spots[:, None] - result.coords[None]
    held = np.all((away >= 0) & (away <= side), axis=2)
    bare = ~np.any(held, axis=1)
    spot = tuple(spots[bare][0].tolist())
    with pytest.raises(UsageError, match=r"no tile there; the nearest is row \d+, from \d+,\d+ on"):
        result.tile_at(spot)


def test_crops_are_the_slides_own_pixels_where_it_is_there(
    sample: Sample, result_file: Path
) -> None:
    result = open_source(result_file)
    rows = np.array([30])
    with SlidePictures(result, sample.slide) as sharp, SlidePictures(result, None) as stored:
        assert sharp.sharp
        assert not stored.sharp
        assert sharp.tiles(rows)[0].shape == (112, 112, 3)
        small = stored.tiles(rows)[0]
        assert small.shape[0] == pytest.approx(112 / 4, abs=1)
        again = np.asarray(Image.fromarray(sharp.tiles(rows)[0]).resize(small.shape[1::-1]))
        assert np.abs(again.astype(int) - small).mean() < 12


def view(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str]:
    """Run the command; its exit code and what it says on stderr."""
    code = main(["view", *map(str, words), "--width-px", "400"])
    return code, capsys.readouterr().err


def test_a_slide_that_has_gone_is_told_in_one_line_with_what_to_do(
    result_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with h5py.File(result_file, "r+") as file:
        file.attrs["slide_path"] = str(tmp_path / "gone.svs")
    code, err = view(capsys, result_file, "--out", tmp_path)
    assert code == 0
    assert err == (
        f"WARNING: {tmp_path}/gone.svs: the slide is not there any more; drawing from the small "
        "picture in the result; pass --slide PATH where the slide has moved, or --no-slide\n"
    )
    assert view(capsys, result_file, "--out", tmp_path, "--no-slide") == (0, "")


def test_that_a_slide_has_gone_is_told_once_of_all_its_results_and_pictures(
    sample: Sample,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    for model in ("one", "other"):
        for name in ("a", "b"):
            gone = changed(sample, slide=tmp_path / f"{name}.svs")
            path = write_result(tmp_path / "in" / model / f"{name}.h5", gone)
    words = ["--overview", "--clusters", "2"]
    code, _ = view(capsys, tmp_path / "in", *words, "--out", tmp_path / "out")
    assert code == 0
    starts = [message.partition(": ")[0] for message in caplog.messages]
    assert starts == [f"{tmp_path}/a.svs", f"{tmp_path}/b.svs"]
    for named in (None, tmp_path / "nowhere.svs"):
        caplog.clear()
        bioptimus.draw(path, "clusters", count=2, width_px=400, slide=named)
        assert len(caplog.messages) == 1


def test_a_slide_that_is_there_needs_no_word(
    result_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert view(capsys, result_file, "--out", tmp_path, "--overview") == (0, "")


def test_another_slide_than_that_of_the_result_is_refused(
    result_file: Path, tmp_path: Path, shared_slides: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = shared_slides / "aperio" / "small.svs"
    code, err = view(capsys, result_file, "--out", tmp_path, "--slide", other)
    assert code == 2
    assert err == (
        f"error: {other}: is 16 x 16 px, slide.h5 was made from 2220 x 2967 px\n"
    )  # fmt: skip


@pytest.mark.parametrize("name", ["gone.h5", ""])
def test_a_path_that_is_no_file_is_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    code, err = view(capsys, tmp_path / name)
    assert code == 2
    assert err.count("\n") == 1
    (tmp_path / "damaged.h5").write_bytes(b"text")
    assert view(capsys, tmp_path / "damaged.h5")[0] == 1


def test_fewer_clusters_than_asked_for_are_told(
    sample: Sample, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sample.features is not None
    alike = sample.features.copy()
    alike[3:] = alike[3]
    path = write_result(tmp_path / "a.h5", changed(sample, features=alike))
    code, err = view(capsys, path, "--out", tmp_path, "--clusters", "6", "--no-slide")
    assert code == 0
    assert "only 4 of 6 clusters: no more tiles differ" in err
    figure = figures.draw_clusters(open_source(path), SMALL, count=6)
    assert any("4 of 6" in text.get_text() for text in figure.texts)
    figure = figures.draw_clusters(open_source(path), SMALL, count=4)
    assert not any(" of 4" in text.get_text() for text in figure.texts)


@pytest.mark.parametrize("slide", ["gone.svs", "other"])
def test_a_slide_that_is_gone_or_another_one_leaves_the_thumbnail(
    sample: Sample, result_file: Path, slide: str, shared_slides: Path
) -> None:
    path = Path(slide) if slide == "gone.svs" else shared_slides / "aperio" / "small.svs"
    with SlidePictures(open_source(result_file), path) as pictures:
        assert not pictures.sharp
        ground = pictures.ground(600)
    assert sample.thumbnail is not None
    assert ground is not None
    np.testing.assert_array_equal(ground.pixels, sample.thumbnail[0])


@pytest.mark.parametrize("kind", ["overview", "embedding", "clusters", "prediction"])
def test_an_empty_slide_has_pictures_too(sample: Sample, tmp_path: Path, kind: str) -> None:
    result = open_source(write_result(tmp_path / "empty.h5", empty(sample)))
    known: dict[str, dict[str, object]] = {
        "clusters": {"count": 3},
        "prediction": {"column": "brightness"},
    }
    options = known.get(kind, {})
    figure = getattr(figures, f"draw_{kind}")(result, SMALL, **options)
    words = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert "no tiles were kept" in words
    assert pixels_of(drawn(result, tmp_path / "a.png", kind, **options)).min() < 100


def test_a_file_without_a_thumbnail_is_drawn_on_white(sample: Sample, tmp_path: Path) -> None:
    bare = changed(sample, thumbnail=None, mask=None)
    result = open_source(write_result(tmp_path / "bare.h5", bare))
    for kind in ("overview", "embedding"):
        drawn(result, tmp_path / f"{kind}.png", kind)


def test_one_tile_is_enough_for_every_picture(sample: Sample, tmp_path: Path) -> None:
    assert sample.features is not None
    one = changed(
        sample,
        coords=sample.coords[:1],
        features=sample.features[:1],
        predictions=sample.features[:1, :3].copy(),
    )
    path = write_result(tmp_path / "one.h5", one)
    words = "--overview --embedding --column 0 --clusters 4 --tile 0 --width-px 400"
    done = CliRunner().invoke(
        app,
        ["view", str(path), "--out", str(tmp_path), *words.split()],
        catch_exceptions=False,
    )
    assert done.exit_code == 0
    assert len(done.stdout.splitlines()) == 5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--column", "KRT5"], "no predicted value named KRT5; known are brightness"),
        (["--tile", "9999"], "has rows 0 to"),
        (["--clusters", "13"], "must be 1 to 12"),
        (["--at", "12"], "give x,y in level-0 pixels"),
        (["--at", "-5,9e9"], "no tile there"),
        (["--tile", "1", "--at", "1,2"], "give one of them"),
        (["--width-px", "10"], "must be 300 to 12000"),
        (["--slide", "nowhere.svs"], "no such file"),
        (["--embedding", "--fit-on", "."], "holds no result files"),
        (["--embedding", "--fit-on", "gone"], "gone: no such folder"),
        (["--embedding", "--fit-on", __file__], "is a file, not a folder"),
    ],
)
def test_a_wrong_choice_is_a_usage_error_that_says_what_is_right(
    result_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    words: str,
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    done = CliRunner().invoke(app, ["view", str(result_file), *arguments])
    assert isinstance(done.exception, UsageError)
    assert words in str(done.exception)
    # Nothing is drawn before it is known that all can be.
    done = CliRunner().invoke(app, ["view", str(result_file), "--overview", *arguments])
    assert words in str(done.exception)
    assert not list(tmp_path.rglob("*.png"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--overview", "--fit-on", "."], "--fit-on .: is not used; it colours the pictures of"),
        (["--overview", "--neighbours", "3"], "--neighbours 3: is not used without --tile or --at"),
        (["--slide", "gone.svs", "--no-slide"], "--slide gone.svs: is not used; leave out --no-s"),
    ],
)
def test_an_option_that_the_pictures_do_not_use_is_told(
    sample: Sample,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    arguments: list[str],
    words: str,
) -> None:
    write_result(tmp_path / "a.h5", changed(sample, features=None))
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["view", "a.h5", "--no-slide", *arguments])
    assert done.exit_code == 0
    (told,) = caplog.messages
    assert told.startswith(words)


@pytest.mark.parametrize(
    ("dataset", "where"),
    [
        ("coords", "coords"),
        ("thumbnail", "thumbnail"),
        ("features", "row 5"),
        ("predictions", "row 5"),
    ],
)
def test_a_damaged_file_is_one_clear_error_and_no_picture(
    sample: Sample,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    dataset: str,
    where: str,
) -> None:
    path = damage(write_result(tmp_path / "a.h5", sample), dataset, row=5)
    picture = ["--column", "0"] if dataset == "predictions" else ["--embedding"]
    code, err = view(capsys, path, *picture, "--no-slide", "--out", tmp_path / "views")
    assert code == 1
    assert len(err.splitlines()) == 1
    assert f"a.h5: has other values in {where} than were written" in err
    assert not list(tmp_path.rglob("*.png"))


def test_a_file_without_embeddings_says_how_to_get_them(sample: Sample, tmp_path: Path) -> None:
    path = write_result(tmp_path / "only.h5", changed(sample, features=None))
    with pytest.raises(UsageError, match="bioptimus predict --with-embeddings"):
        figures.draw_clusters(open_source(path), SMALL, count=3)


def test_an_out_that_is_a_file_is_wrong_usage(
    result_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    code, err = view(capsys, result_file, "--out", tmp_path / "file")
    assert code == 2
    assert "is a file, not a folder" in err


def test_a_picture_that_cannot_be_written_is_an_output_error(
    result_file: Path, tmp_path: Path
) -> None:
    with pytest.raises(OutputError, match=r"cannot be written: .*; mend that, or choose"):
        drawn(open_source(result_file), tmp_path / "gone" / "a.png", "overview")


@pytest.mark.parametrize("words", [(), ("--overwrite",)])
def test_a_folder_where_a_picture_is_to_be_does_not_stop_the_others(
    sample: Sample, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    for name in ("a", "b"):
        write_result(tmp_path / "in" / f"{name}.h5", sample)
    mine = tmp_path / "out" / "a.overview.png"
    mine.mkdir(parents=True)
    asked = [tmp_path / "in", "--no-slide", "--overview", "--out", mine.parent]
    assert main(["view", *map(str, asked), *words]) == 1
    said = capsys.readouterr()
    told = f"error: {mine}: is a folder, and a file is to be written there; move it away\n"
    assert said.err == told
    assert said.out == f"{mine.parent}/b.overview.png\n"


def test_a_file_where_a_folder_of_pictures_is_to_be_is_called_one(
    sample: Sample, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_result(tmp_path / "in" / "sub" / "a.h5", sample)
    mine = tmp_path / "out" / "sub"
    mine.parent.mkdir()
    mine.touch()
    asked = [tmp_path / "in", "--no-slide", "--overview", "--out", mine.parent]
    assert main(["view", *map(str, asked)]) == 1
    told = f"error: {mine}: is a file, and a folder is to be there; move it away\n"
    assert capsys.readouterr().err == told


def test_without_matplotlib_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"bioptimus-wsi\[view\]"):
        figures.check_installed()


def test_embeddings_are_read_in_bounded_blocks(
    sample: Sample, result_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sample.features is not None
    width = sample.features.shape[1]
    monkeypatch.setattr("bioptimus.view.source._BLOCK_BYTES", 4 * width * 50)
    sizes = [len(block) for block in open_source(result_file).feature_blocks()]
    assert max(sizes) == 50
    assert sum(sizes) == len(open_source(result_file))


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
@pytest.mark.parametrize(
    "name", ["a$\\frac$b", '<script>alert(1)&"', "😐 スライド", "pct%s {0}", "two\nlines"]
)
def test_any_name_of_a_slide_and_of_a_value_is_drawn_as_it_is(
    tmp_path: Path, name: str, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    column = name.replace("\n", " ")
    path = make_result(tmp_path / f"{name}.h5", output_names=(column, "x", "y"))
    words = ["--no-slide", "--embedding", "--column", column, "--format", suffix]
    code, err = view(capsys, path, "--out", tmp_path / "out", *words)
    assert (code, err) == (0, "")
    for picture in (tmp_path / "out").iterdir():
        if suffix == "pdf":
            assert picture.read_bytes().startswith(b"%PDF-")
        if suffix == "svg":
            text = "".join(ElementTree.parse(picture).getroot().itertext())
            # A line end as two letters: a page has one line for the name.
            assert f"{name}.svs".replace("\n", "\\n") in text


def test_a_drawing_of_any_name_shows_itself_in_a_notebook(tmp_path: Path) -> None:
    assert bioptimus.draw(make_result(tmp_path / "スライド.h5"))._repr_png_()


def test_the_ticks_of_nearly_equal_values_stand_whole(tmp_path: Path) -> None:
    path = make_result(tmp_path / "a.h5", prediction_dim=1, output_names=("x",))
    with h5py.File(path, "r+") as file:
        file["predictions"][:, 0] = 1 + np.arange(11) * 1e-4
        del file["row_crc32"]
    figure = figures.draw_prediction(open_source(path), SMALL, column="x")
    figure.draw_without_rendering()
    bar = figure.axes[-1]
    assert bar.yaxis.get_offset_text().get_text() == ""
    assert bar.get_yticklabels()[1].get_text().startswith("1.000")


def test_a_drawing_shows_itself_in_a_notebook_and_saves(result_file: Path, tmp_path: Path) -> None:
    result = bioptimus.open_result(result_file)
    drawing = bioptimus.draw(result, "clusters", count=3, width_px=500)
    with Image.open(io.BytesIO(drawing._repr_png_())) as shown:
        assert shown.format == "PNG"
        assert shown.width == 500
    with Image.open(drawing.save(tmp_path / "a.png")) as saved:
        assert saved.width == 500
    assert isinstance(result.plot("overview", width_px=500), Drawing)


def test_drawing_does_not_choose_a_backend_for_the_caller(result_file: Path) -> None:
    code = (
        "import sys, bioptimus; bioptimus.draw(sys.argv[1]); "
        "print('matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(result_file)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


def test_a_picture_that_there_is_not_names_those_there_are(result_file: Path) -> None:
    with pytest.raises(UsageError, match="overview, embedding, prediction, clusters or nearest"):
        bioptimus.draw(result_file, "umap")  # type: ignore[arg-type]


def test_a_file_that_is_missing_or_unfinished_says_so(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="no such file; check the path"):
        open_source(tmp_path / "a.h5")
    (tmp_path / "a.h5.part").write_bytes(b"")
    with pytest.raises(OutputError, match="unfinished; run the same command again"):
        open_source(tmp_path / "a.h5")
