"""A damaged result that would end the process that reads it, or hold it up, is one error."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest

from bioptimus.errors import OutputError
from bioptimus.inference import guard, hdf5_image
from bioptimus.inference.results import open_result
from bioptimus.inference.writers import look_at_existing
from bioptimus.report_html import write_html
from bioptimus.verify import verify
from cli.main import main
from tests.result_files import crashing, endless, make_result

CRASHES = "reading it crashes the HDF5 library; it is damaged: move it away and make it again"
ENDLESS = "reading it never ends in the HDF5 library; it is damaged: move it away and make it again"


def endless_of_ours(path: Path) -> Path:
    """A result of which a block of the disk, in its texts, reads as zeros."""
    content = bytearray(make_result(path).read_bytes())
    start = content.index(b"GCOL") + 512
    content[start : start + 512] = bytes(512)
    path.write_bytes(content)
    return path


def as_of_old(path: Path) -> Path:
    """A result in the structure that h5py writes unless told otherwise."""
    new = make_result(path).rename(path.with_suffix(".new"))
    with h5py.File(new) as source, h5py.File(path, "w") as copy:
        for name in source:
            source.copy(name, copy)
        for name, value in source.attrs.items():
            copy.attrs[name] = value
    new.unlink()
    return path


DEADLY: dict[Callable[[Path], Path], str] = {
    crashing: CRASHES,
    endless: ENDLESS,
    endless_of_ours: ENDLESS,
}


@pytest.fixture(autouse=True)
def quick_guard(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The process that reads first is given up soon, and knows no file of an earlier test."""
    monkeypatch.setattr(guard, "_LONGEST_CPU_S", 0.3)
    monkeypatch.setattr(guard, "_guard", guard._Guard())
    monkeypatch.setattr(hdf5_image, "_looked_at", {})
    yield
    guard._guard.close()


@pytest.mark.parametrize("make", DEADLY)
def test_each_command_tells_of_a_file_that_ends_its_reader_and_goes_on_with_the_others(
    make: Callable[[Path], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    bad, good = out / "lite0" / "bad.h5", out / "lite0" / "good.h5"
    good.parent.mkdir(parents=True)
    make(bad)
    make_result(good)
    with pytest.raises(OutputError) as told:
        look_at_existing(bad, digest="", digest_parameters={})
    assert str(told.value) == f"{bad}: {DEADLY[make]}"
    for words, made in (
        (["convert", "--to", "npz", "--out"], "good.npz"),
        (["view", "--no-slide", "--overview", "--out"], "good.overview.png"),
    ):
        target = tmp_path / words[0]
        assert main([words[0], str(out), *words[1:], str(target)]) == 1
        assert [path.name for path in target.rglob("good*")] == [made]
        assert f"error: {bad}: {DEADLY[make]}\n" in capfd.readouterr().err
    assert write_html(out, tmp_path / "page.html") == 2
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert DEADLY[make] in page
    assert "good.svs" in page


def test_a_sound_file_of_the_old_layout_is_read_by_another_process_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Path] = []
    begin = guard.ReadingProcess.begin

    def noting(self: guard.ReadingProcess, path: Path) -> None:
        begun.append(path)
        begin(self, path)

    monkeypatch.setattr(guard.ReadingProcess, "begin", noting)
    old = as_of_old(tmp_path / "a.h5")
    result = open_result(old)
    new = open_result(make_result(tmp_path / "b.h5"))
    assert np.array_equal(result.features, new.features)
    assert np.array_equal(result.coords, new.coords)
    assert begun == [old]


@pytest.mark.parametrize("names", [3, 30_000])
def test_a_file_of_our_own_is_read_at_once(
    names: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise AssertionError(path)

    monkeypatch.setattr(hdf5_image, "why_deadly", refuse)
    path = tmp_path / "a.h5"
    with hdf5_image.HDF5Image(checksums=True) as image:
        image.add_names("names", [f"name of gene {number}" for number in range(names)])
        image.set_attributes({"format": "text"})
    image.save(path, lambda *_: np.zeros(0))
    with hdf5_image.open_to_read(path) as file:
        heaps = file.attrs["heap_crc32"]
        assert file["names"].asstr()[-1] == f"name of gene {names - 1}"
    assert len(heaps) == path.read_bytes().count(b"GCOL\1")


def test_a_heap_that_begins_at_the_end_of_a_page_is_found() -> None:
    memory = hdf5_image._MemoryFile()
    for place in (5, 65_533, 131_072):
        memory.seek(place)
        memory.write(b"GCOL\1\0\0\0")
    assert list(memory.find(b"GCOL\1\0\0\0")) == [5, 65_533, 131_072]


def test_a_result_that_somebody_wrote_a_text_into_is_read_all_the_same(tmp_path: Path) -> None:
    path = make_result(tmp_path / "a.h5")
    with h5py.File(path, "r+") as file:
        dict(file.attrs)  # a new text is then put where the others lie
        file.attrs["label"] = "tumour"
    assert open_result(path).attributes["label"] == "tumour"
    found = verify(tmp_path)
    assert not found.findings
    assert [note.problem for note in found.notes] == [
        "holds other texts than were written: a program added to it, or it is damaged"
    ]


def test_a_file_that_has_changed_since_is_looked_at_again(tmp_path: Path) -> None:
    path = make_result(tmp_path / "a.h5")
    open_result(path)
    crashing(tmp_path / "b.h5")
    shutil.move(tmp_path / "b.h5", path)
    with pytest.raises(OutputError, match="crashes"):
        open_result(path)
