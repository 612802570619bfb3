"""Each format is read back by the other side's own library."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import warnings
import weakref
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from bioptimus.batch.result_files import find_results
from bioptimus.convert import FORMATS, Converted, ConvertOptions, convert
from bioptimus.convert.record import RECORD_NAME
from bioptimus.counting import counted
from bioptimus.errors import OutputError, UsageError
from bioptimus.inference.results import Result, open_result
from bioptimus.models.types import InferenceMode
from cli.convert import To
from cli.main import main
from tests.result_files import DIM, GENES, MPP, NAMES, damage, make_result

with warnings.catch_warnings():
    # What these packages and theirs warn about while being imported is not ours to mend.
    warnings.simplefilter("ignore")
    anndata = pytest.importorskip("anndata")
    pyarrow_parquet = pytest.importorskip("pyarrow.parquet")
    shapely = pytest.importorskip("shapely")
    zarr = pytest.importorskip("zarr")


def run(source: Path, out: Path, to: str, **options: Any) -> list[Path]:
    done = list(convert([source], out, to=to, options=ConvertOptions(**options)))
    assert [item.problem for item in done] == [None]
    return [path for item in done for path in item.outputs]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make_result(tmp_path / "results" / "a.h5")


@pytest.fixture
def result(path: Path) -> Result:
    return open_result(path)


def test_a_glob_that_the_shell_left_alone_names_results_and_folders_of_them(tmp_path: Path) -> None:
    for name in ("run/m1/a.h5", "run/m2/below/b.h5", "run/c.h5", "run/d.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        make_result(tmp_path / name)
    found = find_results([tmp_path / "run" / "*"])
    assert {str(relative) for relative in found.values()} == {"m1/a.h5", "m2/below/b.h5", "c.h5"}
    twice = find_results([tmp_path / "run" / "m1", tmp_path / "run" / "*", tmp_path / "run/c.h5"])
    assert len(twice) == 3
    (odd,) = find_results([make_result(tmp_path / "[x].h5")])
    assert odd.name == "[x].h5", "a file of that name is no glob"
    with pytest.raises(UsageError, match="matches this glob"):
        find_results([tmp_path / "run" / "x*"])


def test_trident_tree_has_the_names_and_attributes_its_readers_want(
    path: Path, result: Result, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    written = run(path, out, "trident")
    assert [str(item.relative_to(out)) for item in written] == [
        "20x_224px_0px_overlap/patches/a_patches.h5",
        "20x_224px_0px_overlap/features_tiny/a.h5",
        "thumbnails/a.jpg",
        "contours_geojson/a.geojson",
    ]
    for file_path in written[:2]:
        with h5py.File(file_path, "r") as file:
            np.testing.assert_array_equal(file["coords"][:], result.coords)
            attributes = dict(file["coords"].attrs)
        assert attributes.pop("patch_size") == 224
        level0 = attributes.pop("patch_size_level0")
        assert level0 == 448
        # Their slide encoders make a tensor of it and divide coordinates: a whole number.
        assert np.issubdtype(type(level0), np.integer)
        assert attributes.pop("level0_magnification") == pytest.approx(40)
        assert attributes.pop("target_magnification") == 20
        assert attributes.pop("overlap") == 0
        assert attributes.pop("name") == "a"
        assert attributes.pop("savetodir") == "20x_224px_0px_overlap"
        assert attributes.pop("level0_width") == 2240
        assert attributes.pop("level0_height") == 1344
        assert not attributes
    with h5py.File(written[1], "r") as file:
        np.testing.assert_array_equal(file["features"][:], result.features)
        assert file["features"].dtype == np.float32
        assert file["features"].attrs["name"] == "a"
        assert file["features"].attrs["savetodir"] == "20x_224px_0px_overlap/features_tiny"
    contours = json.loads(written[3].read_text())
    islands = shapely.from_geojson(json.dumps(contours["features"][0]["geometry"]))
    assert islands.is_valid
    assert islands.bounds == (64, 64, 34 * 64, 20 * 64)


def test_our_own_file_has_the_attributes_that_trident_wants_too(path: Path) -> None:
    with h5py.File(path, "r") as file:
        assert set(file["coords"].attrs) - {"crc32"} == {
            "patch_size",
            "patch_size_level0",
            "level0_magnification",
            "target_magnification",
            "overlap",
            "name",
            "savetodir",
            "level0_width",
            "level0_height",
        }


def test_clam_folders_have_the_names_and_attributes_its_readers_want(
    path: Path, result: Result, tmp_path: Path
) -> None:
    import torch

    out = tmp_path / "out"
    patches, features, tensor = run(path, out, "clam")
    assert patches == out / "patches" / "a.h5"
    with h5py.File(patches, "r") as file:
        np.testing.assert_array_equal(file["coords"][:], result.coords)
        attributes = dict(file["coords"].attrs)
    assert attributes["patch_level"] == 0
    assert attributes["patch_size"] == 448
    assert attributes["downsample"].tolist() == [1, 1]
    assert attributes["level_dim"].tolist() == [2240, 1344]
    assert attributes["downsampled_level_dim"].tolist() == [2240, 1344]
    assert attributes["name"] == "a"
    assert attributes["save_path"] == "patches"
    assert len(attributes) == 7
    assert features == out / "h5_files" / "a.h5"
    with h5py.File(features, "r") as file:
        assert set(file) == {"features", "coords"}
        np.testing.assert_array_equal(file["features"][:], result.features)
    assert tensor == out / "pt_files" / "a.pt"
    loaded = torch.load(tensor, weights_only=True)
    assert loaded.dtype == torch.float32
    np.testing.assert_array_equal(loaded.numpy(), result.features)


def test_float16_features_reach_trident_and_clam_as_float32(tmp_path: Path) -> None:
    path = make_result(tmp_path / "a.h5", dtype="float16")
    for to, name in (("trident", "20x_224px_0px_overlap/features_tiny"), ("clam", "h5_files")):
        run(path, tmp_path / to, to)
        with h5py.File(tmp_path / to / name / "a.h5", "r") as file:
            assert file["features"].dtype == np.float32


def test_anndata_reads_genes_and_positions(path: Path, result: Result, tmp_path: Path) -> None:
    (written,) = run(path, tmp_path, "h5ad")
    data = anndata.read_h5ad(written)
    assert data.shape == (11, 3)
    assert data.var_names.tolist() == list(NAMES)
    np.testing.assert_array_equal(data[:, "KRT8"].X.ravel(), result.prediction("KRT8"))
    np.testing.assert_array_equal(data.obsm["X_embedding"], result.features)
    np.testing.assert_allclose(data.obsm["spatial"], result.centers)
    np.testing.assert_allclose(data.obsm["spatial_um"], result.centers_um)
    assert data.obs["x"].tolist() == result.coords[:, 0].tolist()
    assert data.obs["slide"].unique().tolist() == ["a.svs"]
    picture = data.uns["spatial"]["a.svs"]
    assert picture["images"]["hires"].shape == (42, 70, 3)
    # Where squidpy draws a tile: centre times scale factor, in thumbnail pixels.
    scale = picture["scalefactors"]["tissue_hires_scalef"]
    assert scale == pytest.approx(1 / 32)
    assert data.uns["bioptimus"]["slide_name"] == "a.svs"
    assert json.loads(data.uns["bioptimus"]["model_spec"])["name"] == "tiny"


def test_anndata_of_embeddings_alone_has_them_as_values(tmp_path: Path) -> None:
    path = make_result(tmp_path / "a.h5", mode=InferenceMode.EMBEDDING, dtype="float16")
    (written,) = run(path, tmp_path, "h5ad")
    data = anndata.read_h5ad(written)
    assert data.shape == (11, DIM)
    assert data.X.dtype == np.float32
    assert data.var_names[0] == "embedding_0"


def test_geojson_tiles_are_squares_with_measurements_inside_the_slide(
    path: Path, result: Result, tmp_path: Path
) -> None:
    (written,) = run(path, tmp_path, "geojson")
    features = json.loads(written.read_text())["features"]
    assert len(features) == 11
    assert len({feature["id"] for feature in features}) == 11
    for feature, corner, values in zip(features, result.coords, result.predictions, strict=True):
        polygon = shapely.from_geojson(json.dumps(feature["geometry"]))
        assert polygon.is_valid
        assert polygon.bounds[:2] == tuple(corner)
        assert polygon.bounds[2] == corner[0] + 448
        assert polygon.bounds[3] == pytest.approx(min(1344, corner[1] + 112 / MPP[1]), abs=0.01)
        assert feature["properties"]["objectType"] == "tile"
        measurements = feature["properties"]["measurements"]
        assert [measurements[name] for name in NAMES] == values.tolist()
        assert 0.5 <= measurements["tissue_ratio"] <= 1


def test_geojson_tissue_is_outlines_with_area_and_means(
    path: Path, result: Result, tmp_path: Path
) -> None:
    (written,) = run(path, tmp_path, "geojson", geometry="tissue", measurements=("KRT8",))
    (feature,) = json.loads(written.read_text())["features"]
    polygon = shapely.from_geojson(json.dumps(feature["geometry"]))
    inside = shapely.contains_xy(polygon, *result.centers.T)
    measurements = feature["properties"]["measurements"]
    assert feature["properties"]["objectType"] == "annotation"
    assert measurements["area_um2"] == pytest.approx(polygon.area * MPP[0] * MPP[1], rel=1e-6)
    assert measurements["tiles"] == inside.sum() > 0
    expected = result.prediction("KRT8")[inside].mean()
    assert measurements["KRT8 mean"] == pytest.approx(expected, rel=1e-6)
    assert "EPCAM mean" not in measurements


def test_geojson_tissue_leaves_holes_out(tmp_path: Path) -> None:
    mask = np.ones((21, 35), np.uint8)
    mask[5:12, 5:20] = 0
    path = make_result(tmp_path / "a.h5", tissue_mask=mask)
    (written,) = run(path, tmp_path, "geojson", geometry="tissue")
    (feature,) = json.loads(written.read_text())["features"]
    polygon = shapely.from_geojson(json.dumps(feature["geometry"]))
    assert polygon.area == int(mask.sum()) * 64**2
    measurements = feature["properties"]["measurements"]
    assert measurements["area_um2"] == pytest.approx(polygon.area * MPP[0] * MPP[1], rel=1e-6)
    centers = open_result(path).centers
    assert measurements["tiles"] == shapely.contains_xy(polygon, *centers.T).sum() < len(centers)


def test_geojson_tissue_counts_each_tile_in_its_own_island(tmp_path: Path) -> None:
    mask = np.zeros((21, 35), np.uint8)
    mask[1:8, 1:12] = 1
    mask[8:20, 12:20] = 1  # touches the first one at a corner: one island
    mask[2:6, 24:34] = 1
    mask[10:19, 24:34] = 1
    mask[12:14, 26:28] = 0
    path = make_result(tmp_path / "a.h5", rows=15, failed=(), tissue_mask=mask)
    (written,) = run(path, tmp_path, "geojson", geometry="tissue")
    features = json.loads(written.read_text())["features"]
    polygons = [shapely.from_geojson(json.dumps(feature["geometry"])) for feature in features]
    assert len(polygons) == 3
    centers = open_result(path).centers
    for polygon, feature in zip(polygons, features, strict=True):
        # Of an island that touches itself at a corner the ring does too.
        inside = shapely.contains_xy(polygon.buffer(0), *centers.T).sum()
        assert feature["properties"]["measurements"]["tiles"] == inside > 0


def test_geojson_asks_which_of_too_many_predictions_to_write(tmp_path: Path) -> None:
    path = make_result(tmp_path / "a.h5", prediction_dim=100, output_names=())
    with pytest.raises(UsageError, match=r"a\.h5: 100 predictions are too many .*--measurement"):
        run(path, tmp_path, "geojson")
    (written,) = run(path, tmp_path, "geojson", measurements=("output_7",))
    feature = json.loads(written.read_text())["features"][0]
    assert set(feature["properties"]["measurements"]) == {"tissue_ratio", "output_7"}
    (done,) = convert(
        [path], tmp_path / "b", to="geojson", options=ConvertOptions(measurements=("X",))
    )
    assert done.problem is not None
    assert "has no prediction 'X'" in done.problem


def test_npz_opens_without_pickle(path: Path, result: Result, tmp_path: Path) -> None:
    (written,) = run(path, tmp_path, "npz")
    with np.load(written, allow_pickle=False) as arrays:
        np.testing.assert_array_equal(arrays["features"], result.features)
        np.testing.assert_array_equal(arrays["predictions"], result.predictions)
        np.testing.assert_array_equal(arrays["coords"], result.coords)
        np.testing.assert_array_equal(arrays["coords_um"], result.coords_um)
        np.testing.assert_array_equal(arrays["tissue_ratios"], result.tissue_ratios)
        assert arrays["output_names"].tolist() == list(NAMES)
        assert arrays["thumbnail"].shape == (42, 70, 3)
        assert arrays["thumbnail_downsample"].tolist() == [32, 32]
        assert json.loads(str(arrays["attributes"]))["slide_name"] == "a.svs"


def test_zarr_group_has_the_results_own_names(path: Path, result: Result, tmp_path: Path) -> None:
    (written,) = run(path, tmp_path, "zarr")
    group = zarr.open_group(str(written), mode="r")
    np.testing.assert_array_equal(group["features"][:], result.features)
    np.testing.assert_array_equal(group["predictions"][:], result.predictions)
    np.testing.assert_array_equal(group["coords"][:], result.coords)
    assert group["tissue_mask"].attrs["downsample"] == [64.0, 64.0]
    assert group.attrs["output_names"] == list(NAMES)
    assert group.attrs["input_gene_names"] == list(GENES)
    assert group.attrs["model_spec"]["name"] == "tiny"


def test_parquet_is_a_table_with_a_row_per_tile(path: Path, result: Result, tmp_path: Path) -> None:
    (written,) = run(path, tmp_path, "parquet")
    table = pyarrow_parquet.read_table(written)
    assert table.column_names == [
        "x",
        "y",
        "x_um",
        "y_um",
        "tissue_ratio",
        *NAMES,
        "embedding",
    ]
    assert table["x"].to_pylist() == result.coords[:, 0].tolist()
    np.testing.assert_allclose(table["y_um"], result.coords_um[:, 1])
    np.testing.assert_array_equal(table["KRT8"], result.prediction("KRT8"))
    embeddings = np.array(table["embedding"].to_pylist(), np.float32)
    np.testing.assert_array_equal(embeddings, result.features)
    attributes = json.loads(table.schema.metadata[b"bioptimus"])
    assert attributes["slide_name"] == "a.svs"


def test_a_prediction_named_like_a_column_keeps_both(tmp_path: Path) -> None:
    path = make_result(tmp_path / "a.h5", output_names=("x", "tissue_ratio", "embedding"))
    (written,) = run(path, tmp_path, "parquet")
    names = pyarrow_parquet.read_table(written).column_names
    assert {"x", "prediction_x", "embedding", "prediction_embedding"} <= set(names)
    assert len(set(names)) == len(names)


def test_spatialdata_store_opens_in_both_frames(path: Path, result: Result, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        spatialdata = pytest.importorskip("spatialdata")
        (written,) = run(path, tmp_path, "spatialdata")
        store = spatialdata.read_zarr(written)
        extent = spatialdata.get_extent(store["tiles"], coordinate_system="um")
        picture = spatialdata.get_extent(store["thumbnail"], coordinate_system="global")
    assert len(store["tiles"]) == 11
    table = store["tiles_table"]
    assert table.var_names.tolist() == list(NAMES)
    np.testing.assert_array_equal(table.obsm["X_embedding"], result.features)
    assert extent["x"] == pytest.approx((0, 2240 * 0.25))
    assert picture["x"] == pytest.approx((0, 2240))
    assert picture["y"] == pytest.approx((0, 1344))


# Warnings of SpatialData's own about the format of its files.
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("to", list(FORMATS))
def test_a_slide_without_tissue_converts_too(tmp_path: Path, to: str) -> None:
    if to == "spatialdata":
        pytest.importorskip("spatialdata")
    path = make_result(tmp_path / "a.h5", rows=0, tissue_mask=None)
    written = run(path, tmp_path / "out", to)
    assert written
    assert all(item.exists() for item in written)
    if to == "h5ad":
        assert anndata.read_h5ad(written[0]).shape == (0, 3)
    if to == "parquet":
        assert len(pyarrow_parquet.read_table(written[0])) == 0
    if to == "zarr":
        assert zarr.open_group(str(written[0]), mode="r")["features"].shape == (0, DIM)
    if to == "geojson":
        assert json.loads(written[0].read_text())["features"] == []


def test_folders_keep_their_shape_and_flat_trees_refuse_two_of_one_name(tmp_path: Path) -> None:
    source = tmp_path / "results"
    make_result(source / "tiny" / "a.h5")
    make_result(source / "tiny" / "sub" / "A.h5")
    done = list(convert([source], tmp_path / "npz", to="npz"))
    assert [path for item in done for path in item.outputs] == [
        tmp_path / "npz" / "tiny" / "a.npz",
        tmp_path / "npz" / "tiny" / "sub" / "A.npz",
    ]
    with pytest.raises(UsageError, match=r"tiny/a\.h5 and .*sub/A\.h5 would both become"):
        list(convert([source], tmp_path / "clam", to="clam"))
    assert not (tmp_path / "clam").exists()


def test_an_output_folder_among_the_results_is_not_read_again(tmp_path: Path) -> None:
    source = tmp_path / "results"
    make_result(source / "a.h5")
    for _ in range(2):
        (done,) = convert([source], source / "trident", to="trident", overwrite=True)
        assert done.problem is None
    # Into the very folder of the results: beside them.
    results = list(convert([source / "a.h5"], source, to="npz"))
    assert [item.outputs for item in results] == [(source / "a.npz",)]


def test_one_bad_file_does_not_stop_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "results"
    make_result(source / "a.h5")
    make_result(source / "c.h5")
    (source / "b.h5").write_bytes(b"nonsense")
    out = tmp_path / "out"
    assert main(["convert", str(source), "--to", "npz", "--out", str(out)]) == 1
    printed = capsys.readouterr()
    assert printed.out.split() == [str(out / "a.npz"), str(out / "c.npz")]
    assert printed.err.startswith(f"error: {source}/b.h5: cannot be read")


def test_an_attribute_with_an_odd_name_is_no_hindrance(tmp_path: Path) -> None:
    path = make_result(tmp_path / "a.h5")
    with h5py.File(path, "r+") as file:
        file.attrs[b"a\xff"] = 1
    (done,) = convert([path], tmp_path / "out", to="npz")
    assert done.problem is None
    with np.load(done.outputs[0]) as arrays:
        assert json.loads(str(arrays["attributes"]))["a\udcff"] == 1


def test_a_result_that_is_converted_is_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        make_result(tmp_path / "in" / f"{number}.h5")
    opened: list[weakref.ref[Result]] = []

    def opening(path: Path) -> Result:
        opened.append(weakref.ref(result := open_result(path)))
        return result

    monkeypatch.setattr("bioptimus.convert.run.open_result", opening)
    for number, _ in enumerate(convert([tmp_path / "in"], tmp_path / "out", to="npz")):
        assert sum(ref() is not None for ref in opened) <= 5 - number


@pytest.mark.parametrize("to", ["trident", "clam", "geojson", "npz"])
def test_before_its_turn_nothing_of_a_result_is_read_but_its_attributes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    for number in range(3):
        make_result(tmp_path / "in" / f"{number}.h5")
    opened: list[Result] = []

    def opening(path: Path) -> Result:
        opened.append(open_result(path))
        return opened[-1]

    def read(result: Result) -> set[str]:
        return vars(result).keys() & {"coords", "features", "thumbnail", "tissue_mask"}

    checked: list[Result] = []

    def checking(result: Result) -> None:
        checked.append(result)
        check(result)

    check = Result.check
    monkeypatch.setattr(Result, "check", checking)
    monkeypatch.setattr("bioptimus.convert.run.open_result", opening)
    for number, _ in enumerate(convert([tmp_path / "in"], tmp_path / "out", to=to), start=1):
        assert checked == opened[:number]
        assert not any(map(read, opened[number:]))


@pytest.mark.parametrize("to", FORMATS)
def test_a_damaged_file_is_not_converted_and_the_others_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], to: str
) -> None:
    if to == "spatialdata":
        pytest.importorskip("spatialdata")
    source = tmp_path / "results"
    damage(make_result(source / "a.h5"), "coords")
    damage(make_result(source / "b.h5"), "predictions")
    make_result(source / "c.h5")
    out = tmp_path / "out"
    assert main(["convert", str(source), "--to", to, "--out", str(out)]) == 1
    printed = capsys.readouterr()
    a, *others = printed.err.splitlines()
    assert a.startswith(f"error: {source}/a.h5: has other values in coords than were written")
    assert all("b.h5: has other values in row 10 than" in line for line in others)
    assert len(others) == 1
    assert any(path.name.startswith("c") for path in out.rglob("*"))
    assert not any(path.name.startswith("a") for path in out.rglob("*"))


def dates(out: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}


@pytest.mark.parametrize("to", ["npz", "zarr", "clam", "trident"])
def test_a_rerun_over_a_grown_cohort_makes_what_is_missing_and_ends_well(
    tmp_path: Path, path: Path, to: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = ["convert", str(path.parent), "--to", to, "--out", str(out)]
    assert main(words) == 0
    first = capsys.readouterr().out.splitlines()
    before = dates(out)
    make_result(path.with_name("b.h5"))
    assert main(words) == 0
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == len(first)
    assert not set(shown.out.splitlines()) & set(first)
    assert f"{counted(len(first), 'output')} up to date already\n" in shown.err
    del before[out / RECORD_NAME]
    assert before.items() <= dates(out).items()


@pytest.mark.parametrize("to", ["npz", "zarr", "clam"])
def test_what_was_made_from_something_else_is_replaced_only_when_told_so(
    tmp_path: Path, path: Path, to: str
) -> None:
    out = tmp_path / "out"
    words = ["convert", str(path), "--to", to, "--out", str(out)]
    assert main(words) == 0
    before = dates(out)
    # The same parameters and another row failed: the digest is the same, the result is not.
    digest = open_result(path).digest
    path.unlink()
    make_result(path, failed=(5,))
    assert open_result(path).digest == digest
    assert main(words) == 1
    assert dates(out) == before
    assert main([*words, "--overwrite"]) == 0
    assert dates(out).keys() == before.keys()
    assert not dates(out).items() & before.items()
    assert main(words) == 0


def test_other_options_are_something_else(tmp_path: Path, path: Path) -> None:
    out = tmp_path / "out"
    (tiles,) = run(path, out, "geojson")
    text = tiles.read_text()
    (done,) = convert([path], out, to="geojson", options=ConvertOptions(geometry="tissue"))
    assert done.problem is not None
    assert "not known to be made from this result with these options" in done.problem
    assert tiles.read_text() == text


def test_an_output_replaced_by_a_run_that_could_not_say_so_is_not_taken_for_the_one_before(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    (tiles,) = run(path, out, "geojson")
    with monkeypatch.context() as patched:
        patched.setattr("bioptimus.convert.run.sync_folder", lambda _: sys.exit(1))
        tissue = ConvertOptions(geometry="tissue")
        with pytest.raises(SystemExit):
            list(convert([path], out, to="geojson", options=tissue, overwrite=True))
    (done,) = convert([path], out, to="geojson")
    assert not done.kept
    assert f"{tiles}: is there already and not known to be made from" in (done.problem or "")


# Runs the command line, and kills itself where the first word says.
KILLED = """
import os, signal, sys
from bioptimus.convert import run
from bioptimus.convert.record import RECORD_NAME, Record

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def die_after_the_call(*words):
    announce(*words)
    die()

def die_in_the_middle_of_a_line(record, *_):
    with (record._out / RECORD_NAME).open("a") as file:
        file.write('\\n{"output": "')
    die()

announce = Record.announce
if sys.argv[1] == "written":
    Record.announce = die
elif sys.argv[1] == "announced":
    Record.announce = die_after_the_call
elif sys.argv[1] == "renamed":
    run.sync_folder = die
elif sys.argv[1] == "telling":
    Record.add = die_in_the_middle_of_a_line

from cli.main import main
main(sys.argv[2:])
"""


@pytest.mark.parametrize(
    ("to", "where"),
    [(to, where) for to in ("npz", "zarr") for where in ("announced", "renamed")]
    + [("npz", "written"), ("npz", "telling")],
)
def test_wherever_a_conversion_is_killed_the_same_command_goes_on_with_it(
    tmp_path: Path, path: Path, to: str, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make_result(path.with_name("b.h5"))
    out = tmp_path / "out"
    words = ["convert", str(path.parent), "--to", to, "--out", str(out)]
    killed = subprocess.run([sys.executable, "-c", KILLED, where, *words], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert main(words) == 0
    written = 1 if where in ("renamed", "telling") else 2
    assert len(capsys.readouterr().out.splitlines()) == written
    assert {each.name for each in out.glob(f"*.{to}")} == {f"a.{to}", f"b.{to}"}
    # What is known of them is known of a copy, too.
    copy = shutil.copytree(out, tmp_path / "copy")
    assert main([*words[:-1], str(copy)]) == 0
    assert capsys.readouterr() == ("", "2 outputs up to date already\n")


@pytest.mark.parametrize(
    ("to", "where"),
    [("npz", "written"), ("npz", "announced"), ("npz", "renamed"), ("zarr", "announced")],
)
def test_what_a_killed_run_left_in_the_place_of_another_is_not_mistaken(
    tmp_path: Path, path: Path, to: str, where: str
) -> None:
    out = tmp_path / "out"
    (before,) = run(path, out, to)
    shutil.copy(make_result(tmp_path / "new.h5", rows=9), path)
    words = ["convert", str(path), "--to", to, "--out", str(out), "--overwrite"]
    killed = subprocess.run([sys.executable, "-c", KILLED, where, *words], check=False)
    assert killed.returncode == -signal.SIGKILL
    (done,) = convert([path], out, to=to)
    if where == "renamed":
        assert done.kept == (before,)
    else:
        assert "pass --overwrite" in (done.problem or "")
    assert main(words) == 0


def test_a_file_that_no_conversion_is_known_to_have_made_stays(tmp_path: Path, path: Path) -> None:
    mine = tmp_path / "out" / "a.npz"
    mine.parent.mkdir()
    mine.write_text("dear")
    # Cut short by a kill, and of another program.
    mine.with_name(RECORD_NAME).write_text('{"output": "a.n\n[]\n{}\n')
    (done,) = convert([path], tmp_path / "out", to="npz")
    assert done.problem is not None
    assert mine.read_text() == "dear"


def test_a_result_without_checksums_is_known_by_its_date(tmp_path: Path, path: Path) -> None:
    with h5py.File(path, "r+") as file:
        del file["row_crc32"]
    (written,) = run(path, tmp_path / "out", "npz")
    (done,) = convert([path], tmp_path / "out", to="npz")
    assert (done.kept, done.problem) == ((written,), None)
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    (done,) = convert([path], tmp_path / "out", to="npz")
    assert done.problem is not None


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_that_is_no_zarr_store_is_never_replaced(
    tmp_path: Path, path: Path, overwrite: bool
) -> None:
    mine = tmp_path / "out" / "a.zarr" / "mine.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("dear")
    (done,) = convert([path], tmp_path / "out", to="zarr", overwrite=overwrite)
    assert done.problem is not None
    # And not first that --overwrite would help.
    assert "is a folder that no conversion made" in done.problem
    assert [item.name for item in (tmp_path / "out").iterdir()] == ["a.zarr"]
    assert mine.read_text() == "dear"


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_where_a_file_is_to_be_is_told_before_anything_is_made_of_that_result(
    tmp_path: Path, path: Path, overwrite: bool
) -> None:
    make_result(tmp_path / "results" / "b.h5")
    mine = tmp_path / "out" / "a.npz"
    mine.mkdir(parents=True)
    first, second = convert([path.parent], mine.parent, to="npz", overwrite=overwrite)
    told = f"{mine}: is a folder, and a file is to be written there; move it away"
    assert first.problem == told
    assert second.outputs == (mine.parent / "b.npz",)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    ("to", "name"),
    [
        ("zarr", "a.zarr"),
        ("trident", "thumbnails"),
        ("clam", "pt_files"),
    ],
)
def test_a_file_where_a_folder_is_to_be_is_told_before_anything_is_made_of_that_result(
    tmp_path: Path, path: Path, to: str, name: str, overwrite: bool
) -> None:
    mine = tmp_path / "out" / name
    mine.parent.mkdir()
    mine.write_text("dear")
    (done,) = convert([path], mine.parent, to=to, overwrite=overwrite)
    assert done.problem == f"{mine}: is a file, and a folder is to be there; move it away"
    assert done.outputs == ()
    assert mine.read_text() == "dear"


def test_a_link_to_nothing_where_a_folder_is_to_be_is_called_one(
    tmp_path: Path, path: Path
) -> None:
    mine = tmp_path / "out" / "a.zarr"
    mine.parent.mkdir()
    mine.symlink_to("gone")
    (done,) = convert([path], mine.parent, to="zarr")
    assert (
        done.problem == f"{mine}: is a link to nothing, and a folder is to be there; move it away"
    )


def test_nothing_half_made_is_left_when_writing_fails(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", fail)
    (done,) = convert([path], tmp_path / "out", to="npz")
    assert done.problem == (
        f"{tmp_path}/out/a.npz: cannot be written: No space left on device; "
        "nothing is left under this name"
    )
    assert list((tmp_path / "out").iterdir()) == []


def test_too_little_room_is_said_before_anything_is_written(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1000, 900, 100))
    (done,) = convert([path], tmp_path / "out", to="npz")
    assert done.problem is not None
    wanted = " and about 1 MiB are needed; free some, or choose another --out"
    assert done.problem == f"{path}: 0 MiB are free in {tmp_path / 'out'}{wanted}"
    assert list((tmp_path / "out").iterdir()) == []


def test_what_cannot_be_found_or_named_is_wrong_usage(
    tmp_path: Path, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def words(arguments: list[Path], to: str) -> str:
        with pytest.raises(UsageError) as caught:
            list(convert(arguments, tmp_path / "out", to=to))
        return str(caught.value)

    assert "no such format; known are trident, clam" in words([path], "csv")
    assert "no such file or folder" in words([tmp_path / "none"], "npz")
    (tmp_path / "empty").mkdir()
    assert "no result files (.h5)" in words([tmp_path / "empty"], "npz")
    assert main(["convert", str(path), "--to", "csv", "--out", str(tmp_path)]) == 2
    assert "csv" in capsys.readouterr().err


def test_the_command_knows_every_format() -> None:
    assert [str(name) for name in To] == list(FORMATS)


@pytest.mark.parametrize(
    ("to", "package", "extra"),
    [
        ("h5ad", "anndata", "anndata"),
        ("zarr", "zarr", "zarr"),
        ("parquet", "pyarrow", "parquet"),
        ("spatialdata", "spatialdata", "spatialdata"),
    ],
)
def test_an_absent_package_is_named_once_with_its_extra(
    tmp_path: Path,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    to: str,
    package: str,
    extra: str,
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    make_result(path.with_name("another.h5"))
    out = tmp_path / "out"
    assert main(["convert", str(path.parent), "--to", to, "--out", str(out)]) == 2
    # Once, whatever the number of files.
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"needs the package {package}: pip install 'bioptimus-wsi[{extra}]'")
    if to == "h5ad":
        with pytest.raises(OutputError, match="needs the package anndata"):
            open_result(path).to_anndata()


def test_an_output_folder_that_cannot_be_made_is_told_once(
    tmp_path: Path, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_result(path.with_name("another.h5"))
    (tmp_path / "file").touch()
    words = ["convert", str(path.parent), "--to", "npz", "--out", str(tmp_path / "file")]
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "is a file, not a folder" in line
    with pytest.raises(OutputError, match="cannot be made"):
        next(convert([path.parent], tmp_path / "file", to="npz"))


def test_plain_formats_need_none_of_the_other_packages(path: Path, tmp_path: Path) -> None:
    script = f"""
import sys
import textwrap
for name in ("anndata", "pandas", "pyarrow", "zarr", "spatialdata", "shapely", "geopandas"):
    sys.modules[name] = None
from cli.main import main
for to in ("npz", "geojson", "trident", "clam"):
    assert main(["convert", {str(path)!r}, "--to", to, "--out", {str(tmp_path)!r}]) == 0
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_results_of_other_modes_convert(tmp_path: Path) -> None:
    source = make_result(tmp_path / "a.h5", mode=InferenceMode.PREDICTION)
    check: dict[str, Callable[[list[Path]], bool]] = {
        "trident": lambda files: not any("features" in str(file) for file in files),
        "clam": lambda files: [file.parent.name for file in files] == ["patches"],
        "parquet": lambda files: (
            "embedding" not in pyarrow_parquet.read_table(files[0]).column_names
        ),
        "npz": lambda files: "features" not in np.load(files[0]),
    }
    for to, holds in check.items():
        assert holds(run(source, tmp_path / to, to)), to
    assert isinstance(next(convert([source], tmp_path / "z", to="zarr")), Converted)


def test_full_disk_fails_each_format_in_one_line_and_ends_nothing(tmp_path: Path) -> None:
    """Some libraries end the whole process when a write under them fails."""
    path = make_result(tmp_path / "a.h5", rows=3000)
    formats = [to for to in FORMATS if to != "spatialdata"]
    code = textwrap.dedent(f"""
        import resource, sys
        from cli.main import main
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        for to in {formats!r}:
            print(to, main(["convert", {str(path)!r}, "--to", to, "--out", to]), flush=True)
    """)
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert ended.stdout.split("\n")[:-1] == [f"{to} 1" for to in formats], ended.stderr
    lines = ended.stderr.splitlines()
    assert len(lines) == len(formats)
    assert all("File too large" in line for line in lines)
    assert not [file for file in tmp_path.rglob("*") if ".part" in file.name]
