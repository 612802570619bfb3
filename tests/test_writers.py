import dataclasses
import errno
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from bioptimus.errors import OutputError, OutputMismatchError
from bioptimus.inference import disk, part
from bioptimus.inference.disk import DiskFile
from bioptimus.inference.results import open_result
from bioptimus.inference.writers import Existing, HDF5Writer, check_existing, look_at_part, part_of
from tests.result_files import damage, make_result
from tests.writer_process import DIM, FAILED, ROWS, embeddings, plan, predictions, write

PARAMETERS = plan().digest_parameters


def contents(path: Path) -> dict[str, Any]:
    """Every dataset's bytes and every attribute, as plain h5py gives them."""
    with h5py.File(path, "r") as file:
        found: dict[str, Any] = {f"@{key}": repr(value) for key, value in file.attrs.items()}
        for name, dataset in file.items():
            values = dataset[()]
            raw = values.tolist() if values.dtype.hasobject else values.tobytes()
            found[name] = (values.dtype.str, values.shape, raw)
            found |= {f"{name}@{key}": repr(value) for key, value in dataset.attrs.items()}
    return found


def rows_of(writer: HDF5Writer, first: int, last: int) -> None:
    rows = np.arange(first, last)
    writer.write_rows(rows, embeddings=embeddings(rows), predictions=predictions(rows))


def fill(writer: HDF5Writer, rows: int) -> None:
    for first in range(0, rows, 50):
        rows_of(writer, first, first + 50)


def names_in(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return contents(write(tmp_path_factory.mktemp("undisturbed") / "a.h5"))


class WriterProcesses:
    """The script of :mod:`tests.writer_process`, kept running."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.writer_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, path: Path, *, die_at: int = 0) -> int:
        return self._ask(json.dumps({"path": str(path), "die_at": die_at}))

    def wait(self) -> int:
        """Signal number that ended the child, 0 for success."""
        status = self._ask("wait")
        return os.WTERMSIG(status) if os.WIFSIGNALED(status) else -os.WEXITSTATUS(status)

    def _ask(self, line: str) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="module")
def processes() -> Iterator[WriterProcesses]:
    running = WriterProcesses()
    yield running
    running.close()


def test_rows_written_in_any_order_stand_in_plan_order(tmp_path: Path) -> None:
    path = write(tmp_path / "sub" / "folder" / "a.h5")
    kept = np.array([row for row in range(ROWS) if row not in FAILED])
    with h5py.File(path, "r") as file:
        np.testing.assert_array_equal(file["features"][:], embeddings(kept))
        np.testing.assert_array_equal(file["predictions"][:], predictions(kept))
        np.testing.assert_array_equal(file["coords"][:], plan().coords[kept])
        np.testing.assert_array_equal(file["tissue_ratios"][:], plan().tissue_ratios[kept])
        assert file["output_names"].asstr()[:].tolist() == ["GENE-1", "Gène 2"]
        assert file["input_gene_names"].asstr()[:].tolist() == ["A", "B", "C"]
        assert file["coords"].attrs["patch_size"] == 224
        assert file["thumbnail"].attrs["downsample"].tolist() == [32.0, 32.5]
        np.testing.assert_array_equal(file["tissue_mask"][:], np.eye(20))
        assert file.attrs["state"] == "ok"
        assert file.attrs["complete"]
        assert file.attrs["tiles_per_s"] == 12.5
        assert json.loads(file.attrs["model"]) == {"name": "m"}
    assert names_in(path.parent) == ["a.h5"]


def test_pictures_compressed_on_another_thread_make_the_same_file(tmp_path: Path) -> None:
    paths = [tmp_path / "one" / "a.h5", tmp_path / "other" / "a.h5"]
    with ThreadPoolExecutor(1) as pool:
        for path in paths:
            with HDF5Writer.open(path, plan()) as writer:
                if path is paths[1]:
                    packing = pool.submit(writer.pack_pictures)
                fill(writer, ROWS)
                if path is paths[1]:
                    packing.result()
                writer.finish(state="ok")
    assert paths[1].read_bytes() == paths[0].read_bytes()


def test_failed_tiles_have_no_row_and_are_listed_with_their_reason(tmp_path: Path) -> None:
    with h5py.File(write(tmp_path / "a.h5"), "r") as file:
        table = file["failed_tiles"][:]
        assert file.attrs["tiles_planned"] == ROWS
        assert file.attrs["tiles_failed"] == len(FAILED)
        assert len(file["features"]) == ROWS - len(FAILED)
    assert table["x"].tolist() == [row * 224 for row in sorted(FAILED)]
    assert table["y"].tolist() == [row * 7 for row in sorted(FAILED)]
    assert table["stage"].tolist() == [b"read"] * 3
    assert table["reason"].tolist() == [f"tile {r} is damaged".encode() for r in sorted(FAILED)]


def test_a_slide_without_tissue_gets_a_file_of_no_rows(tmp_path: Path) -> None:
    with HDF5Writer.open(tmp_path / "a.h5", plan(rows=0)) as writer:
        assert not len(writer.pending())
        path = writer.finish(state="empty")
    with h5py.File(path, "r") as file:
        assert file["features"].shape == (0, DIM)
        assert file["features"].dtype == np.float32
        assert file["coords"].shape == (0, 2)
        assert file.attrs["state"] == "empty"


def test_all_tiles_failed_is_a_whole_file(tmp_path: Path) -> None:
    with HDF5Writer.open(tmp_path / "a.h5", plan(rows=2)) as writer:
        writer.fail_tile(0, stage="read", reason="x")
        writer.fail_tile(1, stage="output", reason="NaN")
        path = writer.finish(state="ok")
    with h5py.File(path, "r") as file:
        assert file["features"].shape == (0, DIM)
        assert len(file["failed_tiles"]) == 2


def test_datasets_that_the_mode_does_not_make_are_absent(tmp_path: Path) -> None:
    only = plan(rows=3, prediction_dim=0, output_names=())
    with HDF5Writer.open(tmp_path / "a.h5", only) as writer:
        writer.write_rows(np.arange(3), embeddings=embeddings(np.arange(3)), predictions=None)
        path = writer.finish(state="ok")
    with h5py.File(path, "r") as file:
        assert "predictions" not in file
        assert "features" in file


@pytest.mark.parametrize("rows", [1, 618, 619, 1236, 1237])
def test_rows_survive_at_the_borders_of_chunks(tmp_path: Path, rows: int) -> None:
    # 424 float32 values are 1696 bytes: 618 rows make a chunk of one MiB.
    wide = np.arange(rows * 424, dtype=np.float32).reshape(rows, 424)
    wanted = plan(rows=rows, embedding_dim=424, prediction_dim=0, output_names=())
    with HDF5Writer.open(tmp_path / "a.h5", wanted) as writer:
        writer.write_rows(np.arange(rows), embeddings=wide, predictions=None)
        path = writer.finish(state="ok")
    with h5py.File(path, "r") as file:
        assert file["features"].chunks == (min(rows, 618), 424)
        np.testing.assert_array_equal(file["features"][:], wide)


def test_attributes_may_be_longer_than_an_object_header(tmp_path: Path) -> None:
    genes = [f"ENSG{number:011d}" for number in range(19374)]
    with HDF5Writer.open(
        tmp_path / "a.h5", plan(rows=0, attributes={"model": {"input_genes": genes}})
    ) as writer:
        path = writer.finish(state="empty")
    with h5py.File(path, "r") as file:
        assert json.loads(file.attrs["model"])["input_genes"] == genes


def test_float16_halves_the_rows_and_refuses_what_does_not_fit(tmp_path: Path) -> None:
    half = plan(rows=2, dtype="float16", prediction_dim=0, output_names=())
    with HDF5Writer.open(tmp_path / "a.h5", half) as writer:
        good = np.full((1, DIM), 65504, np.float32)
        writer.write_rows(np.array([0]), embeddings=good, predictions=None)
        with pytest.raises(OutputError, match=r"row 1 are too large for float16; use --dtype"):
            writer.write_rows(np.array([1]), embeddings=good * 2, predictions=None)
        writer.write_rows(np.array([1]), embeddings=good, predictions=None)
        path = writer.finish(state="ok")
    with h5py.File(path, "r") as file:
        assert file["features"].dtype == np.float16


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_refused_and_stays_pending(
    tmp_path: Path, value: float
) -> None:
    with HDF5Writer.open(tmp_path / "a.h5", plan(rows=5)) as writer:
        rows = np.array([4, 2])
        bad = embeddings(rows)
        bad[1, -1] = value
        with pytest.raises(OutputError, match="features of row 2 hold NaN or Inf"):
            writer.write_rows(rows, embeddings=bad, predictions=predictions(rows))
        assert writer.pending().tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("rows", "dim", "words"),
    [
        ([0, 1], DIM - 1, r"features of shape \(2, 32\), not \(2, 33\)"),
        ([0, 5], DIM, "row 0 to 5 of 5"),
        ([-1, 0], DIM, "row -1 to 0 of 5"),
        ([3, 3], DIM, "twice"),
    ],
)
def test_rows_that_do_not_fit_the_plan_are_refused(
    tmp_path: Path, rows: list[int], dim: int, words: str
) -> None:
    with HDF5Writer.open(tmp_path / "a.h5", plan(rows=5)) as writer:
        with pytest.raises(OutputError, match=words):
            writer.write_rows(
                np.array(rows),
                embeddings=np.zeros((2, dim), np.float32),
                predictions=np.zeros((2, 2), np.float32),
            )
        with pytest.raises(OutputError, match="predictions of shape nothing"):
            writer.write_rows(
                np.array([0]), embeddings=np.zeros((1, DIM), np.float32), predictions=None
            )
        assert len(writer.pending()) == 5


def test_a_file_with_rows_missing_cannot_be_finished(tmp_path: Path) -> None:
    with HDF5Writer.open(tmp_path / "a.h5", plan()) as writer:
        rows_of(writer, 0, ROWS - 1)
        with pytest.raises(OutputError, match="1 of 100 rows are missing"):
            writer.finish(state="ok")
    assert names_in(tmp_path) == ["a.h5.part"]


def test_kill_at_every_system_call_leaves_nothing_or_a_part_that_resumes(
    tmp_path: Path, processes: WriterProcesses, undisturbed: dict[str, Any]
) -> None:
    for call in range(1, 1000):
        path = tmp_path / str(call) / "a.h5"
        processes.start(path, die_at=call)
        ended_by = processes.wait()
        if path.exists():
            assert contents(path) == undisturbed
        processes.start(path)
        assert processes.wait() == 0
        assert contents(path) == undisturbed
        check_existing(path, digest="digest", digest_parameters=PARAMETERS)
        assert names_in(path.parent) == ["a.h5"]
        shutil.rmtree(path.parent)
        if ended_by == 0:
            break
    assert 40 < call < 999, "the loop ends when the process outlives its last call"


def test_kill_at_random_moments_loses_nothing(
    tmp_path: Path, processes: WriterProcesses, undisturbed: dict[str, Any]
) -> None:
    start = time.monotonic()
    processes.start(tmp_path / "timed.h5")
    assert processes.wait() == 0
    duration = min(time.monotonic() - start, 0.1)
    chance = random.Random(1)
    kills = finished = 0
    while kills < 50:
        path = tmp_path / f"{finished}.h5"
        pid = processes.start(path)
        deadline = time.monotonic() + chance.uniform(0, 1.5 * duration)
        while time.monotonic() < deadline:
            pass
        # Its parent has not waited for it until we read the answer, so the id is still its own.
        os.kill(pid, signal.SIGKILL)
        kills += processes.wait() == signal.SIGKILL
        if path.exists():
            assert contents(path) == undisturbed
            finished += 1
    path = tmp_path / "last.h5" if path.exists() else path
    processes.start(path)
    assert processes.wait() == 0
    assert contents(path) == undisturbed


def test_rows_of_a_killed_process_are_not_computed_again(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    writer = HDF5Writer.open(path, plan())
    rows = np.arange(10, 20)[::-1]
    writer.write_rows(rows, embeddings=embeddings(rows), predictions=predictions(rows))
    writer.fail_tile(5, stage="read", reason="x")
    # No flush, no close: as a kill leaves it.
    with HDF5Writer.open(path, plan()) as resumed:
        assert resumed.resumed_rows == 10
        assert resumed.started_anew_because is None
        assert resumed.pending().tolist() == [*range(10), *range(20, ROWS)]
    writer.close()


def test_after_a_restart_of_the_machine_only_flushed_rows_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.h5"
    with HDF5Writer.open(path, plan()) as writer:
        rows_of(writer, 0, 10)
        writer.flush()
        rows_of(writer, 10, 20)
    monkeypatch.setattr(part, "_boot_id", lambda: b"another".ljust(64, b"\0"))
    with HDF5Writer.open(path, plan()) as writer:
        assert writer.resumed_rows == 10
        rows_of(writer, 20, 30)
    with HDF5Writer.open(path, plan()) as writer:
        assert writer.resumed_rows == 20


def test_where_the_system_tells_no_start_only_flushed_rows_of_another_process_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.h5"
    monkeypatch.setattr(part, "boot_id", str)
    with HDF5Writer.open(path, plan()) as writer:
        rows_of(writer, 0, 10)
        writer.flush()
        rows_of(writer, 10, 20)
    with HDF5Writer.open(path, plan()) as writer:
        assert writer.resumed_rows == 20
    monkeypatch.setattr(part, "_PROCESS", "another")
    with HDF5Writer.open(path, plan()) as writer:
        assert writer.resumed_rows == 10


def calls_of(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is written to and made safe from now on, in order: the call and the file's name."""
    calls: list[str] = []

    def noted(name: str, real: Any) -> Any:
        def call(target: Any, *arguments: Any, **named: Any) -> Any:
            path = f"/proc/self/fd/{target}" if isinstance(target, int) else None
            file = os.readlink(path) if path else os.fspath(target)
            told = f"{name} {re.sub('[.][0-9a-f]{8}$', '.new', os.path.basename(file))}"
            if calls[-1:] != [told]:
                calls.append(told)
            return real(target, *arguments, **named)

        return call

    for name in ("pwrite", "ftruncate", "fsync", "rename", "unlink"):
        monkeypatch.setattr(os, name, noted(name, getattr(os, name)))
    monkeypatch.setattr(disk, "fdatasync", noted("fsync", disk.fdatasync))
    return calls


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_nothing_has_its_name_or_counts_before_it_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out" / "a.h5"
    write, sync = "pwrite a.h5.part", "fsync a.h5.part"
    calls = calls_of(monkeypatch)
    with HDF5Writer.open(path, plan()) as writer:
        assert calls == [
            "unlink a.h5.part.new",
            "pwrite a.h5.part.new",
            "ftruncate a.h5.part.new",
            "fsync a.h5.part.new",
            "rename a.h5.part.new",
            "fsync out",
        ]
        calls.clear()
        rows_of(writer, 0, 50)
        assert calls == [write]
        writer.flush()
        assert calls == [write, sync, write, sync]
        calls.clear()
        writer.flush()
        assert calls == []
    monkeypatch.setattr(part, "_boot_id", lambda: b"another".ljust(64, b"\0"))
    with HDF5Writer.open(path, plan()) as writer:
        assert calls == [write, sync, write, sync]
        rows_of(writer, 50, ROWS)
        calls.clear()
        writer.finish(state="ok")
    assert calls[-5:] == [
        "pwrite a.h5.part.new",
        "fsync a.h5.part.new",
        "rename a.h5.part.new",
        "fsync out",
        "unlink a.h5.part",
    ]


OTHER = {"model": {"sha256": "cd"}, "tile_mpp": 0.5, "n": 1}


def test_rows_made_with_other_parameters_are_kept_unless_told_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with HDF5Writer.open(path, plan()) as writer:
        rows_of(writer, 0, 10)
    left = part_of(path).read_bytes()
    # Of fewer tiles: where the states of the rows end follows from the part itself.
    other = plan(rows=5, digest="other", digest_parameters=OTHER)
    told = r"a\.h5\.part: holds 10 rows .*\(model\.sha256 is ab there, cd now; n is absent there, 1"
    for look in (HDF5Writer.open, look_at_part):
        with pytest.raises(OutputMismatchError, match=told):
            look(path, other)
    assert part_of(path).read_bytes() == left
    with HDF5Writer.open(path, plan()) as writer:
        assert writer.resumed_rows == 10
    words = "model.sha256 is ab there, cd now; n is absent there, 1 now"
    assert look_at_part(path, other, overwrite=True) == words
    with HDF5Writer.open(path, other, overwrite=True) as writer:
        assert writer.resumed_rows == 0
        assert writer.started_anew_because == words
    with HDF5Writer.open(path, other) as writer:
        assert writer.started_anew_because is None


def test_part_of_other_parameters_that_holds_no_row_starts_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.h5"
    other = plan(digest="other", digest_parameters=OTHER)
    HDF5Writer.open(path, plan()).close()
    with HDF5Writer.open(path, other) as writer:
        assert "model.sha256 is ab there" in (writer.started_anew_because or "")
        rows_of(writer, 0, 10)
    # Not flushed, and the machine was started anew since: those rows count for nobody.
    monkeypatch.setattr(part, "_boot_id", lambda: b"another".ljust(64, b"\0"))
    with HDF5Writer.open(path, plan()) as writer:
        assert "model.sha256 is cd there" in (writer.started_anew_because or "")


@pytest.mark.parametrize(
    "damage", ["empty", "foreign", "short", "header", "no header", "endless header"]
)
def test_a_damaged_part_starts_anew(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "a.h5"
    with HDF5Writer.open(path, plan()) as writer:
        rows_of(writer, 0, 10)
    whole = part_of(path).read_bytes()
    broken = {
        "empty": b"",
        "foreign": b"\x89HDF\r\n\x1a\n" + whole[8:],
        "short": whole[:-1],
        "header": whole[:140] + b"}" + whole[141:],
        "no header": whole[:16] + (2).to_bytes(8, "little") + whole[24:128] + b"[]" + whole[130:],
        "endless header": whole[:16] + b"\xff" * 8 + whole[24:],
    }[damage]
    part_of(path).write_bytes(broken)
    with HDF5Writer.open(path, plan()) as writer:
        assert writer.resumed_rows == 0
        assert writer.started_anew_because


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("digest", None),
        ("parameters", [1]),
        ("layout", [1]),
        ("layout", "x"),
        ("rows", -1),
        ("rows", True),
        ("rows", 30.0),
        ("rows", "30"),
        ("rows", 1 << 62),
        ("columns", ["features"]),
        ("columns", {"features": "8"}),
        ("columns", {"features": -8}),
        ("dtype", "float64"),
        ("dtype", ["float32"]),
        ("coords_crc", None),
    ],
)
def test_a_part_whose_header_holds_what_nobody_writes_is_not_readable(
    tmp_path: Path, name: str, value: object
) -> None:
    path = tmp_path / "a.h5"
    with HDF5Writer.open(path, plan()) as writer:
        rows_of(writer, 0, 10)
    whole = part_of(path).read_bytes()
    length = int.from_bytes(whole[16:24], "little")
    header = json.loads(whole[128 : 128 + length])
    (header if name in header else header["layout"])[name] = value
    text = json.dumps(header).encode()
    damaged = whole[:16] + len(text).to_bytes(8, "little") + whole[24:128] + text
    for wanted in (plan(), plan(digest="other", digest_parameters=OTHER)):
        part_of(path).write_bytes(damaged.ljust(len(whole), b"\1"))
        assert look_at_part(path, wanted) == "it is not a readable part"
        with HDF5Writer.open(path, wanted) as writer:
            assert writer.started_anew_because == "it is not a readable part"
    # Nor does it count as the rows of others, beside a finished file.
    part_of(path).write_bytes(damaged.ljust(len(whole), b"\1"))
    assert part.rows_of_others(part_of(path), OTHER) is None


def test_same_digest_with_other_tiles_is_not_trusted(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with HDF5Writer.open(path, plan()) as writer:
        rows_of(writer, 0, 10)
    moved = plan(coords=plan().coords + 1)
    with HDF5Writer.open(path, moved) as writer:
        assert writer.started_anew_because == "its tiles lie elsewhere"
        rows_of(writer, 0, 10)
    with HDF5Writer.open(path, dataclasses.replace(moved, dtype="float16")) as writer:
        assert writer.started_anew_because == "dtype is float32 there, float16 now"


def test_a_look_at_the_part_tells_what_opening_it_does_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.h5"
    assert look_at_part(path, plan()) is None
    assert names_in(tmp_path) == []
    with HDF5Writer.open(path, plan()) as writer:
        rows_of(writer, 0, 10)
        writer.flush()
        rows_of(writer, 10, 30)
    left = part_of(path).read_bytes()
    before = len(os.listdir("/dev/fd"))
    assert look_at_part(path, plan()) == 30
    assert len(os.listdir("/dev/fd")) == before  # of 100,000 parts none may stay open
    # The machine was started anew: rows that were not flushed do not count.
    monkeypatch.setattr(part, "_boot_id", lambda: b"another".ljust(64, b"\0"))
    others = [
        plan(),
        plan(coords=plan().coords + 1),
        plan(digest="other"),
        plan(dtype="float16"),
    ]
    for other in others:
        part_of(path).write_bytes(left)
        looked = look_at_part(path, other)
        assert part_of(path).read_bytes() == left
        with HDF5Writer.open(path, other) as writer:
            assert looked == (writer.started_anew_because or writer.resumed_rows)
    part_of(path).write_bytes(left[:-1])
    assert look_at_part(path, plan()) == "its size is not what its header says"
    part_of(path).unlink()
    part_of(path).mkdir()
    with pytest.raises(OutputError, match=r"a\.h5\.part: is a folder, and a file is"):
        look_at_part(path, plan())


def test_disk_full_while_writing_names_it_and_leaves_a_part_that_resumes(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with HDF5Writer.open(path, plan()) as writer:
        size = part_of(path).stat().st_size
        rows_of(writer, 0, 50)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, limits[1]))
        try:
            with pytest.raises(OutputError, match=r"a\.h5: cannot write rows: File too large"):
                rows_of(writer, 50, ROWS)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with HDF5Writer.open(path, plan()) as writer:
        assert writer.resumed_rows == 50
        rows_of(writer, 50, ROWS)
        writer.finish(state="ok")
    assert names_in(tmp_path) == ["a.h5"]


def test_disk_full_while_finishing_neither_kills_the_process_nor_loses_rows(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.h5"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with HDF5Writer.open(path, plan()) as writer:
        rows_of(writer, 0, ROWS)
        writer.flush()
        for allowed in (0, 100, 30_000):
            resource.setrlimit(resource.RLIMIT_FSIZE, (allowed, limits[1]))
            try:
                with pytest.raises(OutputError, match=r"a\.h5: cannot finish it: File too large"):
                    writer.finish(state="ok")
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            assert names_in(tmp_path) == ["a.h5.part"]
        writer.finish(state="ok")
    assert names_in(tmp_path) == ["a.h5"]


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_really_full_disk_is_named_and_room_made_later_is_enough(tiny_disk: Path) -> None:
    path = tiny_disk / "a.h5"
    filler = tiny_disk / "filler"
    filler.write_bytes(bytes(900_000))
    rows = 2000
    with HDF5Writer.open(path, plan(rows=rows)) as writer:
        with pytest.raises(OutputError, match=r"No space left on device; .* a\.h5\.part"):
            fill(writer, rows)
        done = int(writer.pending()[0])
    assert 0 < done < rows
    filler.unlink()
    with HDF5Writer.open(path, plan(rows=rows)) as writer:
        assert writer.resumed_rows == done
        rows_of(writer, done, rows)
        filler.write_bytes(bytes(500_000))
        with pytest.raises(OutputError, match="cannot finish it: No space left on device"):
            writer.finish(state="ok")
        filler.unlink()
        writer.finish(state="ok")
    with h5py.File(path, "r") as file:
        np.testing.assert_array_equal(file["features"][:], embeddings(np.arange(rows)))


def test_a_read_only_disk_is_named(tiny_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(tiny_disk)], check=True)
    with pytest.raises(OutputError, match=r"a\.h5: cannot start it: Read-only file system"):
        HDF5Writer.open(tiny_disk / "a.h5", plan())


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"cannot start it: Not a directory; choose another"):
        HDF5Writer.open(tmp_path / "file" / "sub" / "a.h5", plan())


def test_a_folder_removed_in_mid_run_is_named_and_not_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with HDF5Writer.open(folder / "a.h5", plan()) as writer:
        rows_of(writer, 0, ROWS)
        shutil.rmtree(folder)
        for step in (writer.flush, lambda: writer.finish(state="ok")):
            with pytest.raises(
                OutputError, match=r"a\.h5: its folder is there no more; was it rem"
            ):
                step()
    assert not folder.exists()


def test_an_error_of_the_file_system_is_not_taken_for_a_removed_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with HDF5Writer.open(tmp_path / "a.h5", plan()) as writer:
        rows_of(writer, 0, ROWS)
        with monkeypatch.context() as patch:
            faults = Faults(patch, "lstat", errno.ESTALE, 2)
            writer.flush()
        assert faults.left == 0
        writer.finish(state="ok")
    assert not caplog.messages


def test_a_part_removed_in_mid_run_is_told_once_and_loses_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.h5"
    with HDF5Writer.open(path, plan()) as writer:
        rows_of(writer, 0, 10)
        part_of(path).unlink()
        writer.flush()
        rows_of(writer, 10, ROWS)
        writer.flush()
        writer.finish(state="ok")
    (told,) = caplog.messages
    assert told.startswith(f"{part_of(path)}: was removed by somebody; the file is made all the")
    with h5py.File(path, "r") as file:
        np.testing.assert_array_equal(file["features"][:], embeddings(np.arange(ROWS)))


class Faults:
    """An ``os`` function that fails a few times with an error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, code: int, times: int) -> None:
        self._real = getattr(os, name)
        self.code = code
        self.left = times
        monkeypatch.setattr(os, name, self)
        monkeypatch.setattr(disk, "RETRY_DELAYS_S", (0.0, 0.0, 0.0))

    def __call__(self, *arguments: Any) -> Any:
        if self.left:
            self.left -= 1
            raise OSError(self.code, os.strerror(self.code))
        return self._real(*arguments)


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("function", ["pwrite", "pread"])
def test_a_lost_request_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, function: str
) -> None:
    path = tmp_path / "a.h5"
    with HDF5Writer.open(path, plan()) as writer:
        faults = Faults(monkeypatch, function, code, 3)
        rows_of(writer, 0, ROWS)
        writer.finish(state="ok")
        assert faults.left == 0
    with h5py.File(path, "r") as file:
        np.testing.assert_array_equal(file["features"][:], embeddings(np.arange(ROWS)))


def test_a_disk_that_goes_on_failing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HDF5Writer.open(tmp_path / "a.h5", plan()) as writer:
        faults = Faults(monkeypatch, "pwrite", errno.EIO, 4)
        with pytest.raises(OutputError, match="cannot write rows: Input/output error"):
            rows_of(writer, 0, 10)
        assert faults.left == 0
        assert len(writer.pending()) == ROWS


def test_a_part_that_somebody_else_cut_short_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.h5"
    monkeypatch.setattr(disk, "RETRY_DELAYS_S", (0.0,))
    with HDF5Writer.open(path, plan()) as writer:
        rows_of(writer, 0, ROWS)
        os.truncate(part_of(path), 4096)
        with pytest.raises(OutputError, match=r"a\.h5: cannot finish it: .* cut short by somebody"):
            writer.finish(state="ok")
    assert names_in(tmp_path) == ["a.h5.part"]


def test_rows_whose_flush_failed_are_pending_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.h5"
    with HDF5Writer.open(path, plan()) as writer:
        rows_of(writer, 0, 10)
        writer.flush()
        rows_of(writer, 10, 20)

        def fail(_: int) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        with monkeypatch.context() as patch:
            patch.setattr(disk, "fdatasync", fail)
            with pytest.raises(OutputError, match="cannot flush: Input/output error"):
                writer.flush()
        assert writer.pending()[0] == 10
    with HDF5Writer.open(path, plan()) as writer:
        assert writer.resumed_rows == 10


def test_file_locks_are_not_needed(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs a C compiler and LD_PRELOAD")
    source = tmp_path / "nolock.c"
    source.write_text(
        "#include <errno.h>\n"
        "int flock(int fd, int op) { errno = ENOLCK; return -1; }\n"
        "int lockf(int fd, int op, long n) { errno = ENOLCK; return -1; }\n"
    )
    library = tmp_path / "nolock.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    script = """
        import fcntl, sys
        from pathlib import Path
        import h5py
        from bioptimus.inference.writers import check_existing
        from tests.writer_process import plan, write
        path = write(Path(sys.argv[1]))
        assert check_existing(path, digest="digest", digest_parameters={}) is not None
        try:
            h5py.File(path, "r", locking=True)
        except OSError:
            print("locks fail here")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "a.h5")],
        env={**os.environ, "LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "locks fail here\n", done.stderr


def test_two_writers_on_one_file_leave_one_whole_file(
    tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    # A claim that went stale while its owner was only slow: both go on.
    path = tmp_path / "a.h5"
    slow = HDF5Writer.open(path, plan())
    rows_of(slow, 0, 40)
    write(path)
    good = np.array([row for row in range(40, ROWS) if row not in FAILED])
    slow.write_rows(good, embeddings=embeddings(good), predictions=predictions(good))
    slow.fail_tile(50, stage="read", reason="tile 50 is damaged")
    slow.fail_tile(99, stage="read", reason="tile 99 is damaged")
    slow.finish(state="ok")
    with h5py.File(path, "r") as file:
        assert file.attrs["complete"]
        assert len(file["features"]) == ROWS - 2
    assert names_in(tmp_path) == ["a.h5"]


def test_a_part_that_another_run_began_meanwhile_is_left_to_it(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with HDF5Writer.open(path, plan()) as writer:
        rows_of(writer, 0, ROWS)
        part_of(path).unlink()
        with HDF5Writer.open(path, plan()) as other:
            rows_of(other, 0, 10)
            writer.finish(state="ok")
            assert names_in(tmp_path) == ["a.h5", "a.h5.part"]


def test_files_finished_in_many_threads_at_once_are_whole(
    tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    with ThreadPoolExecutor(8) as threads:
        paths = list(threads.map(lambda i: write(tmp_path / f"{i}" / "a.h5"), range(24)))
    assert all(contents(path) == undisturbed for path in paths)


@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_lost_request_while_opening_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    # An os.open each: the part that is not there, the new part, its folder.
    real, calls = os.open, iter(range(1, 100))

    def stale_once(*arguments: Any) -> int:
        if next(calls) == call:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(*arguments)

    monkeypatch.setattr(disk, "RETRY_DELAYS_S", (0.0,))
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", stale_once)
        writer = HDF5Writer.open(tmp_path / "a.h5", plan())
    rows_of(writer, 0, ROWS)
    writer.finish(state="ok")
    assert names_in(tmp_path) == ["a.h5"]


def test_a_lost_request_while_finishing_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, lost = os.rename, [OSError(errno.ESTALE, os.strerror(errno.ESTALE))]

    def stale_once(*arguments: Any) -> None:
        if lost:
            raise lost.pop()
        real(*arguments)

    monkeypatch.setattr(disk, "RETRY_DELAYS_S", (0.0,))
    with HDF5Writer.open(tmp_path / "a.h5", plan()) as writer:
        rows_of(writer, 0, ROWS)
        monkeypatch.setattr(os, "rename", stale_once)
        writer.finish(state="ok")
    assert names_in(tmp_path) == ["a.h5"]


def test_existing_file_is_the_same_another_or_none(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    assert check_existing(path, digest="digest", digest_parameters=PARAMETERS) is None
    write(path)
    found = check_existing(path, digest="digest", digest_parameters=PARAMETERS)
    assert found == Existing(tiles_planned=ROWS, tiles_failed=3)
    with pytest.raises(OutputMismatchError, match=r"tile_mpp is 0\.5 there, 1\.0 now\); pass --o"):
        check_existing(
            path, digest="x", digest_parameters={"model": {"sha256": "ab"}, "tile_mpp": 1.0}
        )


def test_existing_file_is_read_whole_only_where_that_is_asked_for(tmp_path: Path) -> None:
    path = make_result(tmp_path / "a.h5")
    digest = open_result(path).digest
    assert check_existing(path, digest=digest, digest_parameters={}, whole=True) is not None
    damage(path, "features", row=7)
    assert check_existing(path, digest=digest, digest_parameters={}) is not None
    with pytest.raises(OutputError, match="has other values in row 7 than were written"):
        check_existing(path, digest=digest, digest_parameters={}, whole=True)


def test_what_a_kill_after_the_rename_left_is_tidied_up(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5")
    part_of(path).write_bytes(b"left")
    (tmp_path / "a.h5.part.01234567").write_bytes(b"left")
    (tmp_path / "b.h5.part").write_bytes(b"another slide's")
    assert check_existing(path, digest="digest", digest_parameters=PARAMETERS) is not None
    assert names_in(tmp_path) == ["a.h5", "b.h5.part"]


def test_a_part_of_other_parameters_beside_a_finished_file_is_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5")
    other = plan(digest="other", digest_parameters=OTHER)
    with HDF5Writer.open(path, other, overwrite=True) as writer:
        rows_of(writer, 0, 10)
    assert check_existing(path, digest="digest", digest_parameters=PARAMETERS) is not None
    with HDF5Writer.open(path, other) as writer:
        assert writer.resumed_rows == 10


def test_a_file_that_is_damaged_where_its_attributes_lie_is_not_taken_for_done(
    tmp_path: Path,
) -> None:
    path = make_result(tmp_path / "a.h5")
    path.write_bytes(path.read_bytes().replace(b"FRHP", b"    "))
    with pytest.raises(OutputError, match=r"a\.h5: cannot be read: .*: move it .*--overwrite"):
        check_existing(path, digest="digest", digest_parameters=PARAMETERS)


def test_a_truncated_foreign_or_incomplete_file_is_not_taken_for_done(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(OutputError, match=r"a\.h5: cannot be read: .*--overwrite"):
        check_existing(path, digest="digest", digest_parameters=PARAMETERS)
    with h5py.File(path, "w") as file:
        file["x"] = 1
    with pytest.raises(OutputError, match="was not written by bioptimus"):
        check_existing(path, digest="digest", digest_parameters=PARAMETERS)
    path.write_bytes(whole)
    with h5py.File(path, "r+") as file:
        del file.attrs["complete"]
    with pytest.raises(OutputError, match="is not complete"):
        check_existing(path, digest="digest", digest_parameters=PARAMETERS)


def test_a_plan_whose_parts_disagree_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="output names"):
        plan(output_names=("one",))
    with pytest.raises(OutputError, match="tissue ratios"):
        plan(tissue_ratios=np.zeros(3, np.float32))
    with pytest.raises(OutputError, match="coords"):
        plan(coords=np.zeros((ROWS, 2), np.int32))
    with pytest.raises(OutputError, match="complete itself"):
        plan(attributes={"complete": True})
    with pytest.raises(OutputError, match="rows of int8, not of float32 or float16"):
        plan(dtype="int8")
    with (
        HDF5Writer.open(tmp_path / "a.h5", plan(rows=0)) as writer,
        pytest.raises(OutputError, match="complete itself"),
    ):
        writer.finish(state="ok", attributes={"complete": False})


def test_a_stale_handle_is_opened_again_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with DiskFile(path, create=True) as file:
        file.write(b"before", 0)
        os.close(file._fd)  # what the file system does to us; any further use is EBADF
        file._fd = os.open(os.devnull, os.O_RDWR)
        file._reopen()
        file.write(b"after", 6)
        assert file.read(11, 0) == b"beforeafter"


def test_memory_stays_flat_over_a_million_rows(tmp_path: Path) -> None:
    script = """
        import resource, sys
        from pathlib import Path
        import numpy as np
        from bioptimus.inference.writers import HDF5Writer
        from tests.writer_process import plan
        ROWS, DIM, STEP = 1_000_000, 64, 4800
        wanted = plan(rows=ROWS, embedding_dim=DIM, prediction_dim=0, output_names=())
        block = np.ones((STEP, DIM), np.float32)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with HDF5Writer.open(Path(sys.argv[1]), wanted) as writer:
            for first in range(0, ROWS, STEP):
                rows = np.arange(first, min(first + STEP, ROWS))
                writer.write_rows(rows, embeddings=block[: len(rows)], predictions=None)
            writer.finish(state="ok")
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        print(grown * (1 if sys.platform == "darwin" else 1024))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "a.h5")],
        capture_output=True,
        text=True,
        check=True,
    )
    # The rows are 256 MB; positions, states and one chunk are what may be held.
    assert int(done.stdout) < 100e6
