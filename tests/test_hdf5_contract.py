"""docs/hdf5.md says what the files hold, object by object and attribute by attribute."""

import json
import re
import zlib
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from bioptimus.convert import FORMATS, convert
from bioptimus.inference.layout import (
    FORMAT,
    FORMAT_VERSION,
    REQUIRED_ATTRIBUTES,
    REQUIRED_DATASETS,
    WRITER_ATTRIBUTES,
)
from bioptimus.verify import verify
from tests.conftest import ROOT
from tests.result_files import make_result

CONTRACT = (ROOT / "docs" / "hdf5.md").read_text(encoding="utf-8")


def table(after: str) -> dict[str, list[str]]:
    """The first table after a text: names in backticks in column one → the other cells."""
    rows: dict[str, list[str]] = {}
    lines = CONTRACT[CONTRACT.index(after) :].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| ---"))
    for line in lines[start + 1 :]:
        if not line.startswith("|"):
            break
        first, *others = (cell.strip() for cell in line.strip("|").split(" | "))
        rows |= dict.fromkeys(first.replace("`", "").split(", "), others)
    return rows


TYPES: dict[str, Any] = {
    "text": str,
    "JSON": str,
    "int": np.integer,
    "float": np.floating,
    "bool": np.bool_,
    "list of float": np.ndarray,
    "list of int": np.ndarray,
    "list of text": np.ndarray,
}


def check_attributes(found: Any, rows: dict[str, list[str]]) -> None:
    assert set(found) <= set(rows)
    for name, value in found.items():
        kind = rows[name][0]
        assert isinstance(value, TYPES[kind]), name
        if kind == "JSON":
            assert isinstance(json.loads(value), dict)
        if kind == "list of int":
            assert np.issubdtype(value.dtype, np.integer)
        if kind == "list of float":
            assert np.issubdtype(value.dtype, np.floating)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make_result(tmp_path / "a.h5")


def test_every_object_is_in_the_table_with_its_shape_and_type(path: Path) -> None:
    rows = table("## Objects")
    sizes = {"N": 11, "D": 12, "K": 3, "G": 2, "F": 1, "H": None, "W": None, "2": 2, "3": 3}
    with h5py.File(path, "r") as file:
        assert set(file) == set(rows)
        assert set(REQUIRED_DATASETS) <= set(rows)
        for name, (shape, kind, *_) in rows.items():
            wanted = [sizes[letter] for letter in shape.strip("(),").split(", ")]
            found = file[name].shape
            assert len(found) == len(wanted), name
            assert all(w in (None, f) for w, f in zip(wanted, found, strict=True)), name
            if kind in ("int64", "float32", "uint8", "uint32"):
                assert file[name].dtype == kind
        assert list(file["failed_tiles"].dtype.names) == ["x", "y", "stage", "reason"]


def test_every_root_attribute_is_in_the_table_with_its_type(path: Path) -> None:
    rows = table("## Attributes of the root")
    with h5py.File(path, "r") as file:
        check_attributes(file.attrs, rows)
        assert file.attrs["format"] == FORMAT
        assert f"`{FORMAT}`" in rows["format"][1]
        assert rows["format_version"][1].endswith(f" {FORMAT_VERSION}")
    assert {*REQUIRED_ATTRIBUTES, *WRITER_ATTRIBUTES} <= set(rows)


def test_coords_and_the_trident_tree_have_the_attributes_of_the_table(
    path: Path, tmp_path: Path
) -> None:
    rows = table("## Attributes of `coords`")
    (done,) = convert([path], tmp_path / "out", to="trident")
    for written in (path, *done.outputs[:2]):
        with h5py.File(written, "r") as file:
            # The checksum is of the result file alone.
            found = {key: value for key, value in file["coords"].attrs.items() if key != "crc32"}
            assert set(found) == set(rows)
            check_attributes(found, rows)
            assert ("crc32" in file["coords"].attrs) == (written == path)


def test_the_clam_tree_has_the_attributes_of_the_table(path: Path, tmp_path: Path) -> None:
    rows = table("CLAM's `patches` carry these")
    (done,) = convert([path], tmp_path / "out", to="clam")
    with h5py.File(done.outputs[0], "r") as file:
        assert set(file["coords"].attrs) == set(rows)
        check_attributes(file["coords"].attrs, rows)


def test_the_file_is_of_the_oldest_kind_whose_structure_has_checksums(path: Path) -> None:
    # The byte after the signature: version 2 of the superblock, that of HDF5 1.8; 1.10 has 3.
    assert path.read_bytes()[:9] == b"\x89HDF\r\n\x1a\n\2"


def test_no_changed_kind_of_a_text_crashes_who_reads_the_file(path: Path, tmp_path: Path) -> None:
    content = path.read_bytes()
    # Class 9 (of any length), version 1, kind 1 for text: another kind, and the library crashes
    # unless it sees by a checksum that this was not written.
    places = [match.start() + 1 for match in re.finditer(b"\x19\x01\x01", content)]
    assert len(places) > 10
    for place in places:
        damaged = tmp_path / f"{place}.h5"
        damaged.write_bytes(content[:place] + b"\2" + content[place + 1 :])
    found = {finding.path: finding.problem for finding in verify(tmp_path).findings}
    assert len(found) == len(places)
    assert all(problem.startswith("cannot be read") for problem in found.values()), found


def test_every_format_is_in_the_table() -> None:
    assert list(table("## The formats of other tools")) == list(FORMATS)


def test_the_checksums_are_what_the_page_says(path: Path) -> None:
    with h5py.File(path, "r") as file:
        for name in ("coords", "tissue_ratios", "thumbnail", "tissue_mask"):
            assert file[name].attrs["crc32"] == zlib.crc32(file[name][:].tobytes())
        for row, found in enumerate(file["row_crc32"][:]):
            values = file["features"][row].tobytes() + file["predictions"][row].tobytes()
            assert found == zlib.crc32(values)


def test_the_h5py_example_runs(path: Path) -> None:
    example = CONTRACT.split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {}
    exec(example.replace("embeddings/lite0/slide.h5", str(path)), names)
    assert names["features"].shape == (11, 12)
    assert names["x_y_um"].shape == (11, 2)
    assert names["genes"].tolist()[0] == "EPCAM"
    assert names["failed"] == [(1344, 0, "tile 3 is damaged")]
