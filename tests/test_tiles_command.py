"""`bioptimus tiles` plans slides without a model, and no picture can make a slide fail."""

import csv
import io
import json
import os
import shutil
import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image
from typer.testing import CliRunner, Result

from bioptimus import tile_files
from bioptimus.errors import OutputError, SlideReadError
from bioptimus.io.wsi import Slide
from bioptimus.overview import draw_overview, save_overview, tile_edges
from bioptimus.planning import PlanOptions, SlidePlan, plan_slide
from bioptimus.tile_files import TileTable, dump_tiles
from bioptimus.tiles import TileSpec, plan_tiles
from bioptimus.tissue import TissueMask
from cli.main import app
from tests import slides


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(app, ["tiles", *map(str, words)])


def whole_plan(
    dimensions: tuple[int, int],
    *,
    mpp: tuple[float, float] = (0.5, 0.5),
    spec: TileSpec | None = None,
) -> SlidePlan:
    """Every tile of the lattice kept."""
    grid = plan_tiles(dimensions, spec=spec or TileSpec(), mpp=mpp)
    size = (max(1, dimensions[1] // 16), max(1, dimensions[0] // 16))
    downsample = (dimensions[0] / size[1], dimensions[1] / size[0])
    return SlidePlan(
        grid=grid,
        kept=np.arange(len(grid), dtype=np.int64),
        tissue_ratios=np.ones(len(grid), dtype=np.float32),
        mask=TissueMask(mask=np.ones(size, dtype=bool), downsample=downsample, method="none"),
    )


def plan_example(path: Path, options: PlanOptions | None = None) -> SlidePlan:
    with Slide.open(path) as slide:
        return plan_slide(slide, TileSpec(), options)


def test_a_folder_where_the_overview_is_to_be_is_told(example_slide: Path, tmp_path: Path) -> None:
    mine = tmp_path / "out" / "CMU-1-Small-Region.png"
    mine.mkdir(parents=True)
    done = run(example_slide, "--out", tmp_path / "out")
    assert done.exit_code == 0
    told = f"no overview: {mine}: is a folder, and a file is to be written there; move it away\n"
    assert told in done.stderr


def test_counts_overview_and_table_are_given(example_slide: Path, tmp_path: Path) -> None:
    done = run(example_slide, "--out", tmp_path / "out", "--csv", tmp_path / "tiles.csv")
    assert done.exit_code == 0, done.output
    plan = plan_example(example_slide)
    assert f"{len(plan)} of {len(plan.grid)} tiles of 112 µm kept" in done.stdout
    picture = tmp_path / "out" / "CMU-1-Small-Region.png"
    assert str(picture) in done.stdout
    with Image.open(picture) as image:
        assert 800 < max(image.size) <= 1600
    with (tmp_path / "tiles.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [[int(row["x"]), int(row["y"])] for row in rows] == plan.coords.tolist()
    assert [int(row["row"]) for row in rows] == plan.rows.tolist()
    assert [int(row["column"]) for row in rows] == plan.columns.tolist()
    assert [float(row["tissue_ratio"]) for row in rows] == pytest.approx(
        plan.tissue_ratios.tolist(), rel=1e-5
    )


def test_the_table_goes_to_stdout_alone_where_that_is_asked_for(
    example_slide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = (example_slide, "--no-overview", "--dump", "dump", "--tile-mpp", "4")
    assert run(*words, "--csv", "tiles.csv").exit_code == 0
    done = run(*words, "--csv", "-")
    assert done.exit_code == 0, done.output
    assert done.stdout == (tmp_path / "tiles.csv").read_text()
    assert "tiles of 896 µm kept" in done.stderr
    assert not (tmp_path / "-").exists()


def test_dumped_tiles_are_the_readers_pixels(example_slide: Path, tmp_path: Path) -> None:
    done = run(
        *(example_slide, "--out", tmp_path, "--no-overview", "--dump", tmp_path / "dump"),
        *("--tile-size-px", "96", "--tile-mpp", "1", "--overlap-px", "32", "--min-tissue", "0.9"),
    )
    assert done.exit_code == 0, done.output
    files = {path.name for path in (tmp_path / "dump" / "CMU-1-Small-Region").iterdir()}
    options = PlanOptions(tile_size_px=96, tile_mpp=1, overlap_px=32, min_tissue=0.9)
    plan = plan_example(example_slide, options)
    assert files == {f"x{x}_y{y}.png" for x, y in plan.coords.tolist()}
    with Slide.open(example_slide) as slide:
        reader = slide.tile_reader(plan.spec)
        for position in (0, len(plan) - 1):
            tile = plan.tile(position)
            name = tmp_path / "dump" / "CMU-1-Small-Region" / f"x{tile.x}_y{tile.y}.png"
            with Image.open(name) as image:
                assert (np.asarray(image) == reader.read(tile)).all()


def test_blank_slide_is_no_failure_and_gets_its_line_and_picture(tmp_path: Path) -> None:
    """FIELD 89 to 91: an output or a line for every input, and empty is a normal state."""
    path = slides.write_pyramid(tmp_path / "blank.tiff", slides.white(1500, 1200))
    done = run(path, "--out", tmp_path / "out", "--csv", tmp_path / "t.csv", "--dump", tmp_path)
    assert done.exit_code == 0, done.output
    assert "blank.tiff: 0 of " in done.stdout
    assert "no tissue: nothing was left after the step 'no stain'" in done.stderr
    assert (tmp_path / "out" / "blank.png").exists()
    assert (tmp_path / "t.csv").read_text(encoding="utf-8").count("\n") == 1


def test_one_bad_slide_does_not_stop_the_others(example_slide: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.svs"
    bad.write_bytes(b"")
    done = run(bad, example_slide, "--out", tmp_path / "out")
    assert done.exit_code == 1
    assert "error: " in done.stderr
    assert "bad.svs" in done.stderr
    assert "CMU-1-Small-Region.svs: " in done.stdout


def test_slides_of_one_file_name_are_told_apart_and_keep_their_own_files(tmp_path: Path) -> None:
    shades = {"a": (200, 120, 160), "b": (120, 160, 200)}
    for folder, shade in shades.items():
        pixels = np.full((300, 300, 3), shade, np.uint8)
        (tmp_path / "in" / folder).mkdir(parents=True)
        slides.write_pyramid(tmp_path / "in" / folder / "s.tiff", pixels, mpp=1.0, factors=(1,))
        (tmp_path / "in" / folder / "bad.svs").write_bytes(b"")
    done = run(
        *(tmp_path / "in", "--out", tmp_path / "out", "--dump", tmp_path / "dump"),
        *("--csv", tmp_path / "tiles.csv", "--tissue", "none", "--tile-mpp", "1"),
    )
    assert done.exit_code == 1, done.output
    starts = [line.split(": ")[0] for line in done.stdout.splitlines()]
    assert starts == ["a/s.tiff", "a/s.tiff", "b/s.tiff", "b/s.tiff", f"{tmp_path}/tiles.csv"]
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert [line.split(": ")[1] for line in errors] == ["a/bad.svs", "b/bad.svs"]
    assert all(line.count("bad.svs") == 1 for line in errors)
    for folder, shade in shades.items():
        tiles = list((tmp_path / "dump" / folder / "s").iterdir())
        assert tiles
        for picture in (tmp_path / "out" / folder / "s.png", *tiles):
            with Image.open(picture) as image:
                colour = np.median(np.asarray(image.convert("RGB")), axis=(0, 1))
            assert np.abs(colour - shade).max() < 12, picture
    with (tmp_path / "tiles.csv").open(newline="", encoding="utf-8") as file:
        named = [row["slide"] for row in csv.DictReader(file)]
    paths = [str(tmp_path / "in" / folder / "s.tiff") for folder in shades]
    assert sorted(named) == sorted(paths * (len(named) // 2))


def test_list_gives_each_slide_its_scale_and_mask(example_slide: Path, tmp_path: Path) -> None:
    Image.fromarray(np.full((99, 74), 255, dtype=np.uint8)).save(tmp_path / "mask.png")
    (tmp_path / "list.csv").write_text(
        f"slide,mpp,mask\n{example_slide},0.25,mask.png\n", encoding="utf-8"
    )
    done = run(tmp_path / "list.csv", "--no-overview")
    assert done.exit_code == 0, done.output
    assert "100.0% tissue, mpp 0.25 (the list's mpp column)" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--overlap-px", "224"), "overlap 224 px"),
        (("--tile-mpp", "-1"), "tile mpp -1"),
        (("--tissue", ""), "say auto, none"),
    ],
)
def test_impossible_tiles_are_wrong_usage(
    example_slide: Path, tmp_path: Path, words: Sequence[str], message: str
) -> None:
    """FIELD 32: an overlap as large as the tile never ends."""
    done = run(example_slide, "--out", tmp_path, *words)
    assert done.exit_code != 0
    assert message in str(done.exception)


def test_mask_file_that_does_not_fit_fails_its_slide(example_slide: Path, tmp_path: Path) -> None:
    Image.new("L", (50, 20), 255).save(tmp_path / "mask.png")
    done = run(example_slide, "--out", tmp_path, "--tissue", tmp_path / "mask.png")
    assert done.exit_code == 1
    assert "does not have the shape of the slide" in done.stderr


def test_overview_that_cannot_be_written_fails_no_slide(
    example_slide: Path, tmp_path: Path
) -> None:
    """FIELD 22."""
    (tmp_path / "out" / "CMU-1-Small-Region.png").mkdir(parents=True)
    done = run(example_slide, "--out", tmp_path / "out")
    assert done.exit_code == 0
    assert "CMU-1-Small-Region.svs: no overview: " in done.stderr
    assert "tiles of 112 µm kept" in done.stdout


@pytest.mark.parametrize("tile_um", [112.0, 111.999, 112.001])
def test_overview_is_drawn_when_the_width_is_just_over_a_whole_number_of_tiles(
    tile_um: float,
) -> None:
    """FIELD 22: index 445 of 445."""
    for width in (224 * 9, 224 * 9 + 1, 224 * 9 - 1):
        spec = TileSpec(size_px=224, mpp=tile_um / 224)
        plan = whole_plan((width, 501), mpp=(0.5, 0.4999), spec=spec)
        for size in ((101, 25), (1, 1), (width, 501), (3, 700)):
            downsample = (width / size[0], 501 / size[1])
            pixels = np.full((size[1], size[0], 3), 200, dtype=np.uint8)
            drawn = draw_overview(pixels, downsample, plan)
            assert drawn.shape == pixels.shape
            left, top, right, lower = tile_edges(plan, downsample, size)
            assert (left >= 0).all()
            assert (top >= 0).all()
            assert (left < right).all()
            assert (top < lower).all()
            assert right.max() == size[0]
            assert lower.max() == size[1]


def test_overview_shows_kept_tiles_in_full_and_the_rest_paled() -> None:
    plan = whole_plan((2240, 2240))
    half = replace(plan, kept=plan.kept[plan.columns < 5])
    drawn = draw_overview(np.full((224, 224, 3), 100, dtype=np.uint8), (10, 10), half)
    assert drawn[33, 33].tolist() == [100, 100, 100]
    assert drawn[33, 189].tolist() == [187, 187, 187]
    assert drawn[44, 33].tolist() != [100, 100, 100], "the lattice is drawn"


def test_overview_of_a_million_tiles_is_drawn_within_little_memory() -> None:
    plan = whole_plan((112_000, 112_000), mpp=(0.25, 0.25), spec=TileSpec(size_px=56))
    assert len(plan) == 1_000_000
    pixels = np.full((400, 400, 3), 100, dtype=np.uint8)
    tracemalloc.start()
    draw_overview(pixels, (280.0, 280.0), plan)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 150e6


def test_picture_cut_short_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", fail)
    with pytest.raises(OutputError, match="No space left on device; mend that, or choose another"):
        save_overview(tmp_path / "a.png", np.zeros((4, 4, 3), dtype=np.uint8))
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_run_left_of_pictures_and_tables_is_removed_by_a_later_one(
    example_slide: Path, tmp_path: Path
) -> None:
    def temporary(name: str, days_old: int) -> Path:
        path = tmp_path / "out" / f"{name}.part.{days_old:08x}"
        path.parent.mkdir(exist_ok=True)
        path.touch()
        at = time.time() - days_old * 86_400
        os.utime(path, (at, at))
        return path

    names = f"{example_slide.stem}.png", "tiles.csv"
    old = [temporary(name, 3) for name in names]
    at_work = [temporary(name, 0) for name in names]  # another process's, of the same names
    done = run(example_slide, "--out", tmp_path / "out", "--csv", tmp_path / "out" / "tiles.csv")
    assert done.exit_code == 0, done.output
    assert not any(path.exists() for path in old)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *names,
        *(path.name for path in at_work),
    }


def test_a_file_where_a_folder_of_tiles_or_pictures_is_to_be_is_called_one(
    example_slide: Path, tmp_path: Path
) -> None:
    (tmp_path / "in" / "sub").mkdir(parents=True)
    shutil.copy(example_slide, tmp_path / "in" / "sub" / "a.svs")
    for folder in ("pictures", "tiles"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "sub").touch()
    done = run(tmp_path / "in", "--out", tmp_path / "pictures", "--dump", tmp_path / "tiles")
    assert done.exit_code == 1
    for folder in ("pictures", "tiles"):
        file = tmp_path / folder / "sub"
        assert f"{file}: is a file, and a folder is to be there; move it away\n" in done.stderr


def test_table_has_its_name_only_when_whole(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    table = TileTable(path)
    table.add("a.svs", whole_plan((500, 500)))
    table.__exit__(RuntimeError, RuntimeError("stop"), None)
    assert list(tmp_path.iterdir()) == []
    with TileTable(path) as whole:
        whole.add("a.svs", whole_plan((500, 500)))
    assert [each.name for each in tmp_path.iterdir()] == ["t.csv"]
    assert path.read_text(encoding="utf-8").count("a.svs") == 9


def test_unreadable_tiles_are_told_and_too_many_fail_the_slide(tmp_path: Path) -> None:
    path = slides.write_pyramid(
        tmp_path / "a.tiff", slides.tissue(1280, 1280), mpp=0.5, factors=(1, 4), compression="jpeg"
    )
    slides.damage_tile(path, index=8)
    x, y = 3 * 256, 1 * 256
    with Slide.open(path) as slide:
        spec = TileSpec(size_px=256)
        plan = plan_slide(slide, spec, PlanOptions(tissue="none"))
        done = dump_tiles(slide, plan, tmp_path / "few", max_failed_share=0.05)
        assert done.written == len(plan) - 1 == 24
        assert [place[:2] for place in done.failed] == [(x, y)]
        assert not (tmp_path / "few" / f"x{x}_y{y}.png").exists()
        with pytest.raises(SlideReadError, match="1 tiles could not be read, more than allowed"):
            dump_tiles(slide, plan, tmp_path / "many", max_failed_share=0)


def test_dump_holds_few_tiles_at_once(
    example_slide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tile_files, "TILES_AT_ONCE", 3)
    seen: list[int] = []
    with Slide.open(example_slide) as slide:
        plan = plan_slide(slide, TileSpec())
        dump_tiles(slide, plan, tmp_path, threads=1, on_progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == len(plan)
    assert max(np.diff([0, *seen])) <= 3


def test_slide_with_one_huge_level_is_planned_block_by_block(tmp_path: Path) -> None:
    """FIELD 37: no level is refused for its size, and none is held whole."""
    side, stored = 10_240, 512
    blank = np.full((stored, stored, 3), 240, dtype=np.uint8)
    stained = np.full((stored, stored, 3), (200, 120, 170), dtype=np.uint8)
    parts = side // stored
    with tifffile.TiffWriter(tmp_path / "huge.tiff") as writer:
        writer.write(
            (stained if row < 10 else blank for row in range(parts) for _ in range(parts)),
            shape=(side, side, 3),
            dtype=np.uint8,
            tile=(stored, stored),
            photometric="rgb",
            compression="deflate",
            resolution=(20_000, 20_000),
            resolutionunit="CENTIMETER",
            metadata=None,
        )
    tracemalloc.start()
    with Slide.open(tmp_path / "huge.tiff") as slide:
        plan = plan_slide(slide, TileSpec())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < side * side * 3 / 2
    assert int(plan.rows.max()) in (22, 23)
    assert len(plan) == (int(plan.rows.max()) + 1) * 46 - (46 - plan.grid.columns) * 23


def test_annotations_of_one_class_alone_are_planned(example_slide: Path, tmp_path: Path) -> None:
    features = [
        {
            "type": "Feature",
            "geometry": {
                "type": "Polygon",
                "coordinates": [[[x, 0], [x + 225, 0], [x + 225, 225], [x, 225]]],
            },
            "properties": {"classification": {"name": name}},
        }
        for name, x in (("Tumor", 0), ("Stroma", 1122))
    ]
    mask = tmp_path / "mask.geojson"
    mask.write_text(json.dumps(features))
    words = (example_slide, "--no-overview", "--csv", "-", "--min-tissue", "0.9", "--tissue")
    both = run(*words, mask)
    assert [row["x"] for row in csv.DictReader(io.StringIO(both.stdout))] == ["0", "1122"]
    assert "Stroma and Tumor all count as tissue; --tissue-class NAME takes those" in both.stderr
    one = run(*words, mask, "--tissue-class", "Tumor")
    assert [row["x"] for row in csv.DictReader(io.StringIO(one.stdout))] == ["0"]
    assert "count as tissue" not in one.stderr
    stained = run(*words, mask, "--search-in-mask")
    assert [row["x"] for row in csv.DictReader(io.StringIO(stained.stdout))] == []
    none = run(*words, "auto", "--tissue-class", "Tumor")
    assert none.exit_code == 1
    assert "has no mask to take --tissue-class Tumor from" in none.stderr
