"""A full disk is told in one line with what to do, and nothing is left there half written."""

import logging
import shutil
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from bioptimus.batch.stage import Stager
from bioptimus.errors import CheckpointError, OutputError
from bioptimus.io.wsi import Slide
from bioptimus.planning import plan_slide
from bioptimus.runtime import compilation
from bioptimus.runtime.archive import inspect_archive
from bioptimus.runtime.compiled import unpack
from bioptimus.tile_files import dump_tiles
from bioptimus.tiles import TileSpec
from cli.main import main
from tests.test_archive import write_compiled

NO_ROOM = "No space left on device"
MOVE = f"{NO_ROOM}; set BIOPTIMUS_CACHE to a folder with room that you can write"


@pytest.fixture
def full_disk(tiny_disk: Path) -> Path:
    """A file system without a free byte, where folders and empty files can be made."""
    with suppress(OSError), (tiny_disk / "full").open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    return tiny_disk


@pytest.fixture
def full_cache(full_disk: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BIOPTIMUS_CACHE", str(full_disk))
    return full_disk


def left_in(disk: Path) -> list[Path]:
    """What is there beside what filled it; markers and locks are empty, and no results."""
    empty = {".lock", ".used"}
    files = [path for path in disk.rglob("*") if path.is_file() and path.name != "full"]
    return [path for path in files if path.suffix not in empty or path.stat().st_size]


def test_built_in_model_that_finds_no_room(
    full_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", "show", "lite0"]) == 1
    told = capsys.readouterr().err
    assert told.startswith(f"error: {full_cache}/models/lite0-")
    assert told.endswith(f".pt2: cannot be written: {MOVE}\n")
    assert left_in(full_cache) == []


def test_compiled_model_that_finds_no_room_to_be_unpacked(full_cache: Path, tmp_path: Path) -> None:
    path = write_compiled(tmp_path / "c.pt2")
    with pytest.raises(CheckpointError, match=rf"c\.pt2: cannot be unpacked into .*: {MOVE}$"):
        unpack(inspect_archive(path))
    assert left_in(full_cache) == []


def test_model_that_finds_no_room_to_be_compiled(
    full_cache: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilation, "_compile", lambda _, path, **__: shutil.copy(model, path))
    monkeypatch.setenv("CXX", sys.executable)  # any program that is there
    with pytest.raises(CheckpointError, match=rf"compiled/.*\.pt2: .* written: {MOVE}$"):
        compilation.compile_portable(model)
    assert left_in(full_cache) == []


def test_damaged_archive_is_not_laid_at_the_door_of_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BIOPTIMUS_CACHE", str(tmp_path / "cache"))
    info = inspect_archive(write_compiled(tmp_path / "c.pt2"))
    info.path.write_bytes(b"meanwhile another")
    with pytest.raises(CheckpointError, match=r"c\.pt2: cannot be unpacked: File is not a zip"):
        unpack(info)


def test_tile_that_finds_no_room_is_not_left_cut_short(
    example_slide: Path, full_disk: Path
) -> None:
    with Slide.open(example_slide) as slide:
        plan = plan_slide(slide, TileSpec())
        with pytest.raises(OutputError, match=rf"x\d+_y\d+\.png: not written: {NO_ROOM}; mend"):
            dump_tiles(slide, plan, full_disk / "dump")
    assert left_in(full_disk) == []


def test_report_of_a_run_that_finds_no_room_to_begin(
    example_slide: Path, model: Path, full_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["embed", str(example_slide), "--model", str(model), "--tissue", "none"]
    assert main([*words, "--out", str(full_disk)]) == 1
    told = capsys.readouterr().err
    assert told.startswith(f"error: {full_disk}/runs/")
    assert told.endswith(f"cannot be written: {NO_ROOM}; mend that, or choose another --out\n")
    assert left_in(full_disk) == []


def test_staging_folder_that_cannot_be_claimed_is_told_as_that(
    full_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), Stager(full_disk, max_gb=1) as stager:
        told = f"{stager.folder}: cannot be claimed ({NO_ROOM}); after a kill, "
    assert [message.startswith(told) for message in caplog.messages] == [True]
    assert left_in(full_disk) == []
