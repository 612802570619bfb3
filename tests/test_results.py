import base64
import io
import re
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image

import bioptimus
from bioptimus.errors import OutputError
from bioptimus.inference.results import (
    FailedTile,
    Result,
    RowsName,
    open_result,
    position_problem,
)
from bioptimus.models.types import InferenceMode
from bioptimus.report_html import write_html
from tests.result_files import DIM, GENES, MPP, NAMES, TILE, damage, make_result

KEPT = [row for row in range(12) if row != 3]


def test_a_result_gives_back_what_was_written(tmp_path: Path) -> None:
    result = open_result(make_result(tmp_path / "a.h5"))
    assert len(result) == 11
    assert result.state == "ok"
    np.testing.assert_array_equal(result.features[:, 0], KEPT)
    np.testing.assert_array_equal(result.predictions[:, 2], np.array(KEPT) * 3)
    np.testing.assert_array_equal(result.prediction("KRT8"), np.array(KEPT) * 2)
    assert result.coords.dtype == np.int64
    assert result.tissue_ratios.shape == (11,)
    assert result.output_names == NAMES
    assert result.input_gene_names == GENES
    assert result.mode is InferenceMode.PREDICTION_WITH_EMBEDDING
    assert result.tile == TILE
    assert result.model.output_names == NAMES
    assert result.model.input_genes == GENES
    assert result.slide_name == "a.svs"
    assert result.dimensions == (2240, 1344)
    assert result.failed_tiles == (
        FailedTile(x=1344, y=0, stage="read", reason="tile 3 is damaged"),
    )
    assert result.thumbnail is not None
    assert result.thumbnail.pixels.shape == (42, 70, 3)
    assert result.thumbnail.downsample == (32.0, 32.0)
    assert result.tissue_mask is not None
    assert result.tissue_mask.pixels.max() == 1
    assert result.tissue_mask.downsample == (64.0, 64.0)


def test_one_prediction_is_read_alone_and_rows_are_checked_block_by_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_result(tmp_path / "a.h5")
    monkeypatch.setattr("bioptimus.inference.results._BLOCK_BYTES", 1)  # a row at a time
    for number, name in enumerate(NAMES, start=1):
        np.testing.assert_array_equal(open_result(path).prediction(name), np.array(KEPT) * number)
    for row in (5, 6):
        damage(path, "features", row=row)
        with pytest.raises(OutputError, match=f"in row {row} than"):
            open_result(path).check(rows=True)
        damage(path, "features", row=row, by=-1)


@pytest.mark.parametrize(
    ("corner", "outside"),
    [((0, 0), 0), ((9, 4), 0), ((10, 0), 1), ((0, 5), 1), ((-1, 0), 1), ((0, -1), 1)],
)
def test_corner_of_a_tile_lies_on_a_pixel_of_the_slide(
    corner: tuple[int, int], outside: int
) -> None:
    coords = np.array([(3, 3), corner], np.int64)
    told = "has 1 tile whose corner is outside the slide" if outside else ""
    assert position_problem(coords, (10, 5)) == told


def test_a_file_that_this_process_holds_open_with_locks_is_read_all_the_same(
    tmp_path: Path,
) -> None:
    path = make_result(tmp_path / "a.h5")
    with h5py.File(path) as held:
        result = open_result(path)
        np.testing.assert_array_equal(result.features, held["features"][:])


def test_positions_in_micrometres_use_each_axis_own_scale(tmp_path: Path) -> None:
    result = open_result(make_result(tmp_path / "a.h5"))
    x, y = result.coords[-1]
    np.testing.assert_allclose(result.coords_um[-1], [x * MPP[0], y * MPP[1]])
    np.testing.assert_allclose(result.centers_um[-1], [x * MPP[0] + 56, y * MPP[1] + 56])
    np.testing.assert_allclose(result.centers[-1], [x + 224, y + 56 / MPP[1]])


def test_attributes_come_as_plain_python_values(tmp_path: Path) -> None:
    attributes = open_result(make_result(tmp_path / "a.h5")).attributes
    assert type(attributes["slide_width"]) is int
    assert type(attributes["mpp_x"]) is float
    assert attributes["complete"] is True
    assert attributes["versions"] == {"bioptimus-wsi": "0.1.0"}
    assert attributes["warnings"] == []
    assert attributes["tiles_failed"] == 1


def test_the_public_name_is_lazy(tmp_path: Path) -> None:
    path = make_result(tmp_path / "a.h5")
    assert len(bioptimus.open_result(str(path))) == 11
    assert "open_result" in dir(bioptimus)
    with pytest.raises(AttributeError, match="no attribute 'close_result'"):
        getattr(bioptimus, "close_" + "result")
    script = "import sys, bioptimus; print(*{'h5py', 'numpy', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "\n", done.stderr


def test_no_file_stays_open(tmp_path: Path) -> None:
    results = [open_result(make_result(tmp_path / f"{i}.h5")) for i in range(3)]
    assert all(len(result.features) == 11 for result in results)
    for result in results:
        # On a file held open elsewhere in this process, HDF5 refuses to write.
        with h5py.File(result.path, "r+") as file:
            file.attrs["note"] = "written"


def test_many_reads_may_share_one_opening(tmp_path: Path) -> None:
    result = open_result(make_result(tmp_path / "a.h5"))
    with result.held_open() as held:
        result.path.unlink()
        assert held is result
        assert held.read("coords", 0, 2).tolist() == [[0, 0], [448, 0]]
        with result.held_open():
            assert len(result.output_names) == 3
        assert len(result.features) == 11
    with pytest.raises(OutputError, match="No such file"):
        result.read("coords")


def test_arrays_are_read_once_and_parts_of_them_anew(tmp_path: Path) -> None:
    path = make_result(tmp_path / "a.h5")
    result = open_result(path)
    first = result.features
    np.testing.assert_array_equal(result.read("features", 2, 5), first[2:5])
    path.unlink()
    assert result.features is first
    with pytest.raises(OutputError, match=r"a\.h5: cannot be read: .*No such file"):
        result.read("features")


@pytest.mark.parametrize(
    ("mode", "absent"),
    [(InferenceMode.EMBEDDING, "predictions"), (InferenceMode.PREDICTION, "features")],
)
def test_asking_for_what_the_mode_does_not_make_names_what_is_there(
    tmp_path: Path, mode: InferenceMode, absent: str
) -> None:
    result = open_result(make_result(tmp_path / "a.h5", mode=mode))
    with pytest.raises(OutputError, match=rf"a\.h5: has no {absent} \(it has coords, "):
        getattr(result, absent)
    with pytest.raises(OutputError, match="has no prediction 'X'"):
        result.prediction("X")


def test_a_slide_is_told_to_be_no_result_and_not_to_be_damaged(example_slide: Path) -> None:
    words = rf"^{example_slide}: is no result; name a .h5 file that embed or predict has made$"
    with pytest.raises(OutputError, match=words):
        open_result(example_slide)


def test_an_empty_result_opens(tmp_path: Path) -> None:
    result = open_result(make_result(tmp_path / "a.h5", rows=0))
    assert len(result) == 0
    assert result.state == "empty"
    assert result.features.shape == (0, DIM)
    assert result.centers_um.shape == (0, 2)
    assert "0 of 224 px" in result._repr_html_()


def test_names_are_made_up_where_the_model_has_none(tmp_path: Path) -> None:
    result = open_result(make_result(tmp_path / "a.h5", output_names=()))
    assert result.output_names == ("output_0", "output_1", "output_2")


def test_a_file_that_is_not_a_whole_result_says_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"a\.h5: no such file; check the path"):
        open_result(tmp_path / "a.h5")
    with pytest.raises(OutputError, match=r"a\.h5\.part: is unfinished; run the same command"):
        open_result(tmp_path / "a.h5.part")
    path = make_result(tmp_path / "a.h5")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1000])
    with pytest.raises(OutputError, match=r"a\.h5: cannot be read"):
        open_result(path)
    path.write_bytes(b"not HDF5 at all")
    with pytest.raises(OutputError, match=r"a\.h5: cannot be read"):
        open_result(path)


def change(path: Path, what: str) -> None:
    with h5py.File(path, "r+") as file:
        match what:
            case "format":
                del file.attrs["format"]
            case "newer":
                file.attrs["format_version"] = 99
            case "complete":
                file.attrs["complete"] = False
            case "lacking":
                del file.attrs["mpp_x"]
                del file["tissue_ratios"]
            case "rows":
                del file["features"]
                file["features"] = np.zeros((2, DIM), np.float32)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("format", r"was not written by bioptimus: no attribute format .* \(it has coords, failed"),
        ("newer", r"has format version 99, this bioptimus reads up to 1; install a newer"),
        ("complete", "is not complete; make it again"),
        ("lacking", "lacks the dataset tissue_ratios, attribute mpp_x; make it again"),
        ("rows", "2 rows of features for 11 of coords"),
    ],
)
def test_a_changed_file_is_refused_in_words(tmp_path: Path, what: str, words: str) -> None:
    path = make_result(tmp_path / "a.h5")
    change(path, what)
    with pytest.raises(OutputError, match=words):
        open_result(path)


READ: dict[str, Callable[[Result], object]] = {
    "coords": lambda result: result.centers,
    "tissue_ratios": lambda result: result.tissue_ratios,
    "output_names": lambda result: result.model,
    "input_gene_names": lambda result: result.input_gene_names,
    "failed_tiles": lambda result: result.failed_tiles,
    "thumbnail": lambda result: result.thumbnail,
    "tissue_mask": lambda result: result.tissue_mask,
}


@pytest.mark.parametrize("dataset", READ)
def test_a_damaged_dataset_is_an_error_and_no_other_values(tmp_path: Path, dataset: str) -> None:
    path = make_result(tmp_path / "a.h5")
    READ[dataset](open_result(path))
    damage(path, dataset)
    words = rf"a\.h5: has other values in {dataset} than were written; it is damaged or was edited"
    with pytest.raises(OutputError, match=words):
        READ[dataset](open_result(path))
    with pytest.raises(OutputError, match=words):
        open_result(path).check()
    READ[dataset](open_result(path, check=False))


@pytest.mark.parametrize("dataset", ["features", "predictions"])
@pytest.mark.parametrize("asked", ["features", "predictions"])
def test_a_damaged_row_is_an_error_whichever_kind_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: RowsName, dataset: str
) -> None:
    path = damage(make_result(tmp_path / "a.h5"), dataset, row=7)
    for start, stop in ((0, None), (5, 9), (7, 8)):
        with pytest.raises(OutputError, match="has other values in row 7 than were written"):
            open_result(path).read(asked, start, stop)
    assert len(open_result(path).read(asked, 0, 7)) == 7
    open_result(path).check()
    with pytest.raises(OutputError, match="in row 7 than"):
        open_result(path).check(rows=True)
    assert len(open_result(path, check=False).read(asked)) == 11
    # The one kind is not read for the other's sake where it is very large.
    monkeypatch.setattr("bioptimus.inference.results._MOST_READ_TO_CHECK", 0)
    assert len(open_result(path).read(asked)) == 11


@pytest.mark.parametrize("kind", ["features", "predictions"])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_what_is_no_number_is_an_error_in_files_without_checksums_too(
    tmp_path: Path, kind: RowsName, value: float
) -> None:
    path = make_result(tmp_path / "a.h5")
    with h5py.File(path, "r+") as file:
        file[kind][5, 1] = value
        del file["row_crc32"]
    for start in (0, 4):
        with pytest.raises(OutputError, match=f"has NaN or Inf in {kind} of row 5, which"):
            open_result(path).read(kind, start)
    assert not np.isfinite(open_result(path, check=False).read(kind)).all()
    assert write_html(tmp_path, tmp_path / "a.html") == 1


def test_a_tile_outside_the_slide_is_an_error_in_files_without_checksums_too(
    tmp_path: Path,
) -> None:
    path = make_result(tmp_path / "a.h5")
    with h5py.File(path, "r+") as file:
        file["coords"][5] = (1 << 60, 0)
        del file["coords"].attrs["crc32"]
    with pytest.raises(OutputError, match="has 1 tile whose corner is outside the slide; make"):
        _ = open_result(path).coords
    assert len(open_result(path, check=False).coords) == 11
    assert write_html(tmp_path, tmp_path / "a.html") == 1


def test_rows_of_one_kind_are_looked_at_and_files_without_checksums_are_read(
    tmp_path: Path,
) -> None:
    path = make_result(tmp_path / "a.h5", mode=InferenceMode.EMBEDDING)
    damage(path, "features", row=2)
    with pytest.raises(OutputError, match="in row 2 than"):
        _ = open_result(path).features
    with h5py.File(path, "r+") as file:
        del file["row_crc32"]
        del file["coords"].attrs["crc32"]
    assert len(open_result(path).features) == len(open_result(path).coords) == 11


def test_a_notebook_shows_a_card_with_the_thumbnail(tmp_path: Path) -> None:
    path = make_result(tmp_path / "a.h5", attributes={"slide_name": "<b>.svs"})
    card = open_result(path)._repr_html_()
    assert "<b>.svs" not in card
    assert "&lt;b&gt;.svs" in card
    assert "1 failed" in card
    found = re.search("base64,([^']*)'", card)
    assert found is not None
    assert Image.open(io.BytesIO(base64.b64decode(found[1]))).format == "PNG"
    assert "11 tiles, model tiny" in repr(open_result(path))


@pytest.mark.parametrize(
    "options",
    [
        {"chunks": (7, 9, 3), "compression": "gzip"},
        {"chunks": (7, 4, 3), "compression": "gzip"},
        {"chunks": (7, 9, 3), "compression": "gzip", "shuffle": True},
        {"chunks": (7, 9, 3), "compression": "lzf"},
        {"chunks": (7, 9, 3)},
        {},
    ],
)
def test_a_picture_is_read_however_another_program_packed_it_anew(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (16, 9, 3), np.uint8)
    with h5py.File(make_result(tmp_path / "a.h5"), "r+") as file:
        shown = dict(file["thumbnail"].attrs, crc32=zlib.crc32(pixels.tobytes()))
        del file["thumbnail"], file["output_names"]
        file.create_dataset("thumbnail", data=pixels, **options).attrs.update(shown)
        packing = {**options, "chunks": (2,)} if options else {}
        file.create_dataset("output_names", data=NAMES, dtype=h5py.string_dtype(), **packing)
    result = open_result(tmp_path / "a.h5")
    assert result.output_names == NAMES
    picture = result.thumbnail
    assert picture is not None
    assert np.array_equal(picture.pixels, pixels)


def test_a_band_that_was_stored_unpacked_is_read(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (2, 9, 3), np.uint8)
    with h5py.File(make_result(tmp_path / "a.h5"), "r+") as file:
        shown = dict(file["thumbnail"].attrs, crc32=zlib.crc32(pixels.tobytes()))
        del file["thumbnail"]
        dataset = file.create_dataset("thumbnail", pixels.shape, np.uint8, chunks=(1, 9, 3),
                                      compression="gzip")  # fmt: skip
        dataset.id.write_direct_chunk((0, 0, 0), zlib.compress(pixels[0].tobytes()))
        dataset.id.write_direct_chunk((1, 0, 0), pixels[1].tobytes(), filter_mask=1)
        dataset.attrs.update(shown)
    picture = open_result(tmp_path / "a.h5").thumbnail
    assert picture is not None
    assert np.array_equal(picture.pixels, pixels)


@pytest.mark.parametrize("unpacked", [b"\0" * 3, b"\0" * 30])
def test_a_packed_band_of_another_length_is_damage(tmp_path: Path, unpacked: bytes) -> None:
    with h5py.File(make_result(tmp_path / "a.h5"), "r+") as file:
        shown = dict(file["thumbnail"].attrs)
        del file["thumbnail"]
        dataset = file.create_dataset("thumbnail", (1, 3, 3), np.uint8, chunks=(1, 3, 3),
                                      compression="gzip")  # fmt: skip
        dataset.id.write_direct_chunk((0, 0, 0), zlib.compress(unpacked))
        dataset.attrs.update(shown)
    with pytest.raises(OutputError, match="cannot be read"):
        _ = open_result(tmp_path / "a.h5").thumbnail
