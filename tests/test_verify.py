import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from bioptimus.batch.inputs import find_inputs
from bioptimus.batch.result_files import find_results
from bioptimus.batch.signals import StopFlag
from bioptimus.errors import OutputError, UsageError
from bioptimus.inference import hdf5_image
from bioptimus.inference.layout import digest_of
from bioptimus.inference.results import open_result
from bioptimus.report_html import write_html
from bioptimus.verify import verify
from cli.main import main
from tests.result_files import DIM, NAMES, crashing, endless, make_result
from tests.slides import damage_tile, tissue, write_pyramid


def problems(out: Path, *, deep: bool = False) -> list[str]:
    return [
        f"{finding.path.relative_to(out)}: {finding.problem}"
        for finding in verify(out, deep=deep).findings
    ]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Two models, three results, one of them empty."""
    folder = tmp_path / "out"
    make_result(folder / "tiny" / "a.h5")
    make_result(folder / "tiny" / "sub" / "b.h5", rows=0)
    make_result(folder / "other" / "a.h5", rows=600, attributes={"model_sha256": "cd" * 32})
    return folder


def test_whole_results_give_no_finding_and_exit_zero(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (out / "runs").mkdir()
    (out / "runs" / "1.json").write_text("{}")
    assert main(["verify", str(out), "--deep"]) == 0
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "3 files, 610 tiles, 0 findings\n"


def test_leftovers_of_stopped_runs_are_found(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("c.h5.part", "c.h5.part.01234567", "c.h5.claim", "c.h5.claim.abc"):
        (out / "tiny" / name).write_bytes(b"")
    assert main(["verify", str(out)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.removeprefix(f"{out}/tiny/") for line in lines] == [
        "c.h5.claim: is a claim: a run is at work on this slide, or died while it was",
        "c.h5.claim.abc: is a claim: a run is at work on this slide, or died while it was",
        "c.h5.part: is unfinished; run the same command again to go on with it",
        "c.h5.part.01234567: was left by a process that was killed; "
        "the next run of this slide removes it",
    ]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def set_value(dataset: str, row: int | slice, value: object) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        with h5py.File(path, "r+") as file:
            file[dataset][row] = value

    return damage


def set_attribute(name: str, value: object) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        with h5py.File(path, "r+") as file:
            file.attrs[name] = value

    return damage


def widen(dataset: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        with h5py.File(path, "r+") as file:
            values = file[dataset][()].astype(np.float64)
            del file[dataset]
            file[dataset] = values

    return damage


def lose(dataset: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        with h5py.File(path, "r+") as file:
            del file[dataset]

    return damage


def replace(dataset: str, values: np.ndarray[Any, Any]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        with h5py.File(path, "r+") as file:
            attributes = dict(file[dataset].attrs)
            del file[dataset]
            file[dataset] = values
            file[dataset].attrs.update(attributes)

    return damage


def set_downsample(value: object) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        with h5py.File(path, "r+") as file:
            file["tissue_mask"].attrs["downsample"] = value

    return damage


def lose_downsample(path: Path) -> None:
    with h5py.File(path, "r+") as file:
        del file["tissue_mask"].attrs["downsample"]


def set_coords_attribute(name: str, value: object) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        with h5py.File(path, "r+") as file:
            file["coords"].attrs[name] = value

    return damage


DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (truncate, "cannot be read"),
    (set_attribute("complete", False), "is not complete"),
    (set_attribute("digest", "00"), "its digest is not that of its parameters"),
    (set_attribute("digest_parameters", '{"x": 1}'), "its digest is not that of"),
    (set_attribute("digest_parameters", '{"x": '), "its digest is not that of"),
    (set_attribute("tiles_planned", 20), "has 11 rows and 1 failed tile of 20 planned"),
    (set_attribute("tiles_failed", 2), "lists 1 failed tile and says 2"),
    (set_attribute("state", "empty"), "has state empty with 12 tiles planned"),
    (set_attribute("mode", "embedding"), "has 3 predicted values in mode embedding"),
    (set_attribute("mode", "Embedding"), "has a mode or model_spec that says nothing"),
    (set_attribute("model_spec", "{"), "has a mode or model_spec that says nothing"),
    (set_attribute("mpp_x", 0.0), "says mpp_x is 0.0"),
    (set_attribute("tile_mpp", "0.5"), "says tile_mpp is 0.5"),
    (lose("features"), "has 0 embedding values in mode prediction_with_embedding"),
    (widen("features"), "holds float64 as features, not float32 or float16"),
    (widen("predictions"), "holds float64 as predictions, not float32 or float16"),
    (replace("thumbnail", np.zeros((0, 0, 3), np.uint8)), "holds uint8 (0, 0, 3) as thumbnail"),
    (replace("thumbnail", np.zeros((2, 2, 4), np.uint8)), "holds uint8 (2, 2, 4) as thumbnail"),
    (replace("output_names", np.array(["A"], "S1")), "has 1 name for 3 predicted values"),
    (lose_downsample, "says nothing as downsample of tissue_mask"),
    (set_downsample([4.0]), "says [4.0] as downsample of tissue_mask"),
    (set_downsample([0.0, 4.0]), "says [0.0, 4.0] as downsample of tissue_mask"),
    (set_downsample([4.0, np.nan]), "says [4.0, nan] as downsample of tissue_mask"),
    (lose("coords"), "lacks the dataset coords"),
    (set_value("features", 5, np.nan), "has 1 row of features with NaN or Inf"),
    (set_value("predictions", 0, np.inf), "has 1 row of predictions with NaN or Inf"),
    (set_value("coords", 2, [0, 0]), "has two rows for one tile"),
    (set_value("coords", 2, [2240, 0]), "has 1 tile whose corner is outside the slide"),
    (set_value("tissue_ratios", 2, np.nan), "has tissue ratios outside 0 to 1"),
    # Facts that stand in two places.
    (set_attribute("mpp_x", 0.5), "says level0_magnification of coords is 40.0, 10 / mpp_x 20"),
    (set_attribute("mpp_y", 0.5), "says 'mpp' of digest_parameters is [0.25, 0.2505], mpp_x"),
    (set_attribute("tile_size_px", 256), "says patch_size of coords is 224, tile_size_px 256"),
    (set_attribute("tile_mpp", 1.0), "says target_magnification of coords is 20.0, 10 / tile"),
    (set_attribute("overlap_px", 8), "says overlap of coords is 0, overlap_px 8"),
    (set_attribute("slide_width", 9000), "says level0_width of coords is 2240, slide_width"),
    (set_attribute("model_sha256", "00"), "says 'model sha256' of digest_parameters is abab"),
    (set_attribute("slide_quickhash", "b"), "says 'slide quickhash' of digest_parameters is a"),
    (set_coords_attribute("patch_size_level0", 224), "says patch_size_level0 of coords is 224"),
    (set_coords_attribute("level0_height", 1), "says level0_height of coords is 1, slide_"),
    # Values as good as any, but not those that were written.
    (set_value("features", 5, 7.0), "has other values in row 5 than were written"),
    (set_value("predictions", slice(0, 2), 7.0), "has other values in 2 rows than were writt"),
    (set_value("coords", 2, [1, 1]), "has other values in coords than were written"),
    (set_value("tissue_ratios", 2, 0.75), "has other values in tissue_ratios than were writt"),
    (set_value("output_names", 0, "CDH1"), "has other values in output_names than were writt"),
    (set_value("thumbnail", 0, 1), "has other values in thumbnail than were written"),
    (set_value("tissue_mask", 0, 1), "has other values in tissue_mask than were written"),
]


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Number of a damage → what is found in its file. One check looks at all: it costs a start."""
    folder = tmp_path_factory.mktemp("damaged")
    paths = [make_result(folder / str(n) / "tiny" / "a.h5") for n in range(len(DAMAGES))]
    assert problems(folder) == []
    for path, (damage, _) in zip(paths, DAMAGES, strict=True):
        damage(path)
    found: dict[str, list[str]] = {}
    for line in problems(folder):
        number, problem = line.split("/", 1)
        found.setdefault(number, []).append(problem)
    return found


@pytest.mark.parametrize(("number", "words"), [(n, words) for n, (_, words) in enumerate(DAMAGES)])
def test_each_damage_is_found(damaged: dict[str, list[str]], number: int, words: str) -> None:
    found = damaged[str(number)]
    assert any(line.startswith(f"tiny/a.h5: {words}") for line in found), found


def test_a_flipped_bit_in_a_row_is_found_and_its_row_named(tmp_path: Path) -> None:
    path = make_result(tmp_path / "a.h5", rows=20, failed=())
    with h5py.File(path, "r") as file:
        start = file["features"].id.get_chunk_info(0).byte_offset
        width = file["features"].shape[1] * 4
    content = bytearray(path.read_bytes())
    content[start + 13 * width] ^= 1
    path.write_bytes(content)
    assert problems(tmp_path) == ["a.h5: has other values in row 13 than were written"]


@pytest.mark.parametrize("rows", [0, 1, 12])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_file_without_checksums_is_as_good(tmp_path: Path, rows: int, dtype: str) -> None:
    path = make_result(tmp_path / "a.h5", rows=rows, failed=(), dtype=dtype)
    assert problems(tmp_path, deep=True) == []
    with h5py.File(path, "r+") as file:
        del file["row_crc32"]
        for dataset in file.values():
            dataset.attrs.pop("crc32", None)
    assert problems(tmp_path, deep=True) == []


def test_no_flipped_bit_ends_the_check(tmp_path: Path) -> None:
    content = make_result(tmp_path / "a.h5").read_bytes()
    places = range(0, len(content), max(1, len(content) // 150))
    for place in places:
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        (tmp_path / f"{place}.h5").write_bytes(damaged)
    assert verify(tmp_path, deep=True).files == len(places) + 1


CRASHES = "reading it crashes the HDF5 library; it is damaged: move it away and make it again"


def test_a_file_that_crashes_the_library_is_a_finding_and_the_others_are_looked_at(
    out: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    crashing(out / "other" / "0.h5")
    crashing(out / "tiny" / "0.h5")
    set_value("coords", 2, [0, 0])(out / "tiny" / "a.h5")
    assert main(["verify", str(out)]) == 1
    told = capfd.readouterr()
    assert [line.removeprefix(f"{out}/") for line in told.out.splitlines()] == [
        f"other/0.h5: {CRASHES}",
        f"tiny/0.h5: {CRASHES}",
        "tiny/a.h5: has two rows for one tile",
        "tiny/a.h5: has other values in coords than were written",
    ]
    assert told.err == "5 files, 610 tiles, 4 findings\n"
    assert main(["verify", str(out), "--json"]) == 1
    found = json.loads(capfd.readouterr().out)["findings"]
    assert found[0] == {"path": f"{out}/other/0.h5", "problem": CRASHES}


def test_a_file_that_crashes_the_library_is_no_missing_one(out: Path, tmp_path: Path) -> None:
    crashing(out / "tiny" / "c.h5")
    (tmp_path / "c.svs").write_bytes(b"")
    wanted = find_inputs([str(tmp_path / "c.svs")]).slides
    assert [f"{finding.path.name}: {finding.problem}" for finding in
            verify(out / "tiny", slides=wanted).findings] == [f"c.h5: {CRASHES}"]  # fmt: skip


def test_a_file_that_the_library_never_ends_to_read_is_a_finding(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bioptimus.verify._LONGEST_CPU_S", 0.5)
    endless(out / "tiny" / "0.h5")
    found = verify(out)
    assert [finding.problem for finding in found.findings] == [
        "reading it never ends in the HDF5 library; it is damaged: move it away and make it again"
    ]
    assert (found.files, found.rows) == (4, 610)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What each process was started with, as they start."""
    started = []
    start = StopFlag.start_child

    def counting(self: StopFlag, *words: Any, **options: Any) -> Any:
        started.append(words)
        return start(self, *words, **options)

    monkeypatch.setattr(StopFlag, "start_child", counting)
    return started


def test_all_files_are_read_by_one_process(out: Path, started: list[Any]) -> None:
    assert verify(out).files == 3
    assert len(started) == 1
    crashing(out / "tiny" / "0.h5")
    assert verify(out).files == 4
    assert len(started) == 3


def test_many_files_are_read_by_several_processes_and_told_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[Any]
) -> None:
    monkeypatch.setattr("bioptimus.verify._FILES_PER_PROCESS", 3)
    monkeypatch.setattr("bioptimus.verify.available_cores", lambda: 4)
    for number in range(13):
        if number % 4 == 1:
            crashing(tmp_path / f"{number:02d}.h5")
        else:
            (tmp_path / f"{number:02d}.h5").write_bytes(b"no HDF5" * number)
    found = verify(tmp_path)
    assert (found.files, found.rows) == (13, 0)
    assert [finding.path.name for finding in found.findings] == [f"{n:02d}.h5" for n in range(13)]
    for number, finding in enumerate(found.findings):
        # That of its own file, though others are read meanwhile.
        assert ("crashes the HDF5 library" in finding.problem) == (number % 4 == 1)
    # The second process ends at 1, 5 and 9, and one more takes none after that.
    assert len(started) == 4 + 2


def test_a_process_that_cannot_start_is_an_error(
    out: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert main(["verify", str(out)]) == 1
    expected = "error: the process that reads files ended with exit code 1\n"
    assert capfd.readouterr().err == expected


# The command, which tells the process that it has started for the files.
VERIFY = """
import signal, sys
# Ignored where this test runs in the background.
signal.signal(signal.SIGINT, signal.default_int_handler)
from bioptimus.batch.signals import StopFlag
from cli.main import main
start = StopFlag.start_child
def telling(*words, **options):
    child = start(*words, **options)
    print(child.pid, flush=True)
    return child
StopFlag.start_child = telling
sys.exit(main(["verify", sys.argv[1]]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_check_and_the_process_that_reads(tmp_path: Path, number: int) -> None:
    endless(tmp_path / "b.h5")
    command = [sys.executable, "-c", VERIFY, str(tmp_path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0
    ) as running:
        assert running.stdout is not None
        reader = int(running.stdout.readline())
        running.send_signal(number)
        shown = running.communicate(timeout=60)
    assert (running.returncode, *shown) == (128 + number, b"", b"")
    with pytest.raises(ProcessLookupError):
        os.kill(reader, 0)


def test_an_empty_file_is_told_as_such(tmp_path: Path) -> None:
    (tmp_path / "a.h5").touch()
    assert problems(tmp_path) == ["a.h5: is empty (0 bytes); remove it and make it again"]


def test_what_verify_says_of_a_file_does_not_send_to_verify(tmp_path: Path) -> None:
    truncate(make_result(tmp_path / "a.h5"))
    (tmp_path / "b.h5").write_bytes(b"text")
    found = problems(tmp_path)
    assert len(found) == 2
    for line in found:
        assert line.endswith("it is damaged or not a result file; move it away and make it again")


def notes(out: Path) -> list[str]:
    return [f"{note.path.relative_to(out)}: {note.problem}" for note in verify(out).notes]


def test_a_renamed_copy_is_found_as_such(tmp_path: Path) -> None:
    path = make_result(tmp_path / "tiny" / "a.h5")
    (tmp_path / "tiny" / "b.h5").write_bytes(path.read_bytes())
    assert problems(tmp_path) == [
        "tiny/b.h5: was renamed: inside it is called a; call it a.h5 again"
    ]
    assert notes(tmp_path) == [f"tiny/b.h5: holds the same slide and model as {path}"]


def test_a_slide_that_a_cohort_holds_twice_is_a_note_and_no_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, rows in (("a", 12), ("b", 15)):
        make_result(
            tmp_path / f"{name}.h5", rows=rows, attributes={"slide_quickhash": "same"},
            digest=digest_of({"rows": rows}), digest_parameters={"rows": rows},
        )  # fmt: skip
    fact = f"holds the same slide and model as {tmp_path}/a.h5"
    assert main(["verify", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert shown.out == f"note: {tmp_path}/b.h5: {fact}\n"
    assert shown.err == "2 files, 25 tiles, 0 findings, 1 note\n"
    assert main(["verify", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "files": 2, "rows": 25, "findings": [], "sampled": 0,
        "notes": [{"path": f"{tmp_path}/b.h5", "problem": fact}],
    }  # fmt: skip


def test_results_of_one_slide_by_other_parameters_may_stand_in_other_folders(
    tmp_path: Path,
) -> None:
    for name in ("10x", "20x"):
        make_result(
            tmp_path / name / "a.h5",
            digest=digest_of({"tiles": name}), digest_parameters={"tiles": name},
        )  # fmt: skip
    assert problems(tmp_path) == notes(tmp_path) == []


def test_one_file_can_be_checked_alone(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(out / "tiny" / "a.h5")]) == 0
    assert capsys.readouterr().err == "1 file, 11 tiles, 0 findings\n"
    with pytest.raises(UsageError, match="is one file; name its folder"):
        verify(out / "tiny" / "a.h5", slides=())


def test_what_macos_puts_beside_a_result_is_none(out: Path, tmp_path: Path) -> None:
    (out / "tiny" / "._a.h5").write_bytes(b"\x00\x05\x16\x07" + bytes(4092))
    found = verify(out)
    assert (found.files, found.findings) == (3, ())
    assert main(["convert", str(out), "--to", "npz", "--out", str(tmp_path / "npz")]) == 0


def test_results_behind_a_link_to_a_folder_are_looked_at_once(out: Path, tmp_path: Path) -> None:
    (out / "other").rename(tmp_path / "moved")
    (out / "other").symlink_to(tmp_path / "moved")
    (out / "a").symlink_to("tiny")
    (tmp_path / "moved" / "up").symlink_to(out)
    (out / "lost").symlink_to(tmp_path / "nowhere")
    set_value("coords", 2, [0, 0])(out / "other" / "a.h5")
    set_value("coords", 2, [0, 0])(out / "tiny" / "a.h5")
    found = verify(out)
    assert found.files == 3
    assert {finding.path for finding in found.findings} == {
        out / "other" / "a.h5",
        out / "tiny" / "a.h5",
    }
    assert list(find_results([out]).values()) == [
        Path("other/a.h5"),
        Path("tiny/a.h5"),
        Path("tiny/sub/b.h5"),
    ]


def test_a_foreign_file_is_found(out: Path) -> None:
    with h5py.File(out / "tiny" / "x.h5", "w") as file:
        file["features"] = np.zeros((2, 2))
    assert problems(out)[0].startswith("tiny/x.h5: was not written by bioptimus")


LISTS = "lists of numbers"


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("features", np.zeros(11, np.float32), "holds float32 (11,) as features; make it again"),
        ("coords", np.zeros((11, 3), np.int64), "holds int64 (11, 3) as coords; make it again"),
        ("row_crc32", np.zeros((11, 2), np.uint32), "holds uint32 (11, 2) as row_crc32; make it"),
        ("failed_tiles", np.zeros(1), "holds float64 (1,) as failed_tiles; make it again"),
        ("output_names", np.zeros(3), "holds float64 (3,) as output_names; make it again"),
        ("output_names", LISTS, "holds object (3,) as output_names; make it again"),
        ("coords", None, "holds no array as coords; make it again"),
        ("@overlap_px", 300, "says nothing of its tiles (overlap 300 px: must be at least 0 and"),
        ("@overlap_px", "x", "says nothing of its tiles (invalid literal for int()"),
        ("@digest_parameters", '{"x": "\\ud800"}', "its digest is not that of its parameters"),
        ("@state", "odd", "says its state is odd; make it again"),
        ("@model_spec", "{}", "model description cannot be read"),
    ],
)
def test_file_that_another_program_bent_is_one_finding_and_the_others_are_looked_at(
    out: Path, name: str, value: Any, problem: str
) -> None:
    with h5py.File(out / "other" / "a.h5", "r+") as file:
        if name.startswith("@"):
            file.attrs[name[1:]] = value
        else:
            del file[name]
            if value is None:
                file.create_group(name)
            elif value is LISTS:
                file.create_dataset(name, shape=3, dtype=h5py.vlen_dtype(np.float32))
            else:
                file.create_dataset(name, data=value)
    found = verify(out, slides=())
    assert [finding.path for finding in found.findings] == [out / "other" / "a.h5"]
    assert problem in found.findings[0].problem
    assert found.files == 3


def test_deep_reads_what_the_fast_check_leaves_out_of_large_files(
    out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_value("features", 300, np.nan)(out / "other" / "a.h5")
    found = ["other/a.h5: has 1 row of features with NaN or Inf"]
    row_bytes = 4 * (DIM + len(NAMES))
    monkeypatch.setattr("bioptimus.verify._SMALL_BYTES", 599 * row_bytes)
    assert problems(out) == found
    monkeypatch.setattr("bioptimus.verify._SMALL_BYTES", 599 * row_bytes - 1)
    assert problems(out) == []
    assert main(["verify", str(out)]) == 0
    assert capsys.readouterr().err == (
        "3 files, 610 tiles, 0 findings; of 1 large file only the first and last 256 rows were "
        "read, --deep reads all\n"
    )
    assert problems(out, deep=True) == found


@pytest.mark.parametrize("name", ["a.h5", "a.h5.part", "a.h5.part.01234567", "a.h5.claim"])
def test_result_of_a_slide_with_a_name_like_a_leftover_is_a_result(
    tmp_path: Path, name: str
) -> None:
    make_result(tmp_path / "tiny" / f"{name}.h5")
    found = verify(tmp_path)
    assert (found.files, found.findings) == (1, ())


def test_slides_without_a_result_are_named_for_each_model(
    out: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slides = tmp_path / "slides"
    for name in ("a.svs", "sub/b.svs", "sub/c.tiff"):
        (slides / name).parent.mkdir(parents=True, exist_ok=True)
        (slides / name).write_bytes(bytes(1234))
    (out / "tiny" / "sub" / "c.h5.part").write_bytes(b"")
    assert main(["verify", str(out), "--slides", str(slides)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f"{out}/other/sub/b.h5: is missing: there is no result of {slides}/sub/b.svs",
        f"{out}/other/sub/c.h5: is missing: there is no result of {slides}/sub/c.tiff",
        f"{out}/tiny/sub/c.h5.part: is unfinished; run the same command again to go on with it",
    ]
    # The folder of one model may be named as well, also as the working directory.
    monkeypatch.chdir(out / "tiny")
    found = verify(Path(), slides=find_inputs([str(slides)]).slides).findings
    assert [finding.path for finding in found] == [Path("sub/c.h5.part")]
    found = verify(out / "tiny", slides=find_inputs([str(slides)]).slides).findings
    assert [finding.path.name for finding in found] == ["c.h5.part"]


def test_part_of_a_slide_that_failed_tells_why_and_not_to_do_the_same_again(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slide = write_pyramid(tmp_path / "a.tif", tissue(512, 512), mpp=0.5, factors=(1,))
    damage_tile(slide)
    out = tmp_path / "out"
    words = ["embed", str(slide), "--model", str(model), "--tissue", "none", "--out", str(out)]
    assert main(words) == 1
    for folder in (out, out / "tiny"):
        capsys.readouterr()
        assert main(["verify", str(folder)]) == 1
        (line,) = capsys.readouterr().out.splitlines()
        assert line.startswith(f"{out}/tiny/a.h5.part: is unfinished: its slide failed: a.tif: ")
        assert "--max-failed-tiles 0.01 allows; raise it" in line
    assert main([*words, "--max-failed-tiles", "0.5"]) == 0
    assert problems(out) == []


def test_the_folder_of_the_results_is_not_that_of_the_slides(
    out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(out)
    for given in (".", str(out)):
        assert main(["verify", ".", "--slides", given]) == 2
        assert capsys.readouterr().err == (
            f"error: --slides {given}: is the folder of the results; name the slides, as the run "
            "was given them\n"
        )


def test_a_slide_that_was_exchanged_since_is_found(out: Path, tmp_path: Path) -> None:
    slide = tmp_path / "a.svs"
    slide.write_bytes(bytes(1234))
    inputs = find_inputs([str(slide)]).slides
    assert verify(out / "tiny", slides=inputs).findings == ()
    slide.write_bytes(bytes(1235))
    (finding,) = verify(out / "tiny", slides=inputs).findings
    assert finding.path == out / "tiny" / "a.h5"
    assert finding.problem == (f"was made from another file: {slide} has 1235 bytes now, 1234 then")


def test_an_empty_output_folder_lacks_every_slide(tmp_path: Path) -> None:
    (tmp_path / "a.svs").write_bytes(b"x")
    (tmp_path / "out").mkdir()
    found = verify(tmp_path / "out", slides=find_inputs([str(tmp_path / "a.svs")]).slides)
    assert [f"{finding.path}: {finding.problem}" for finding in found.findings] == [
        f"{tmp_path}/a.svs: has no result below {tmp_path}/out"
    ]


def test_a_folder_without_results_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(OutputError, match="holds no result files"):
        verify(tmp_path)
    assert main(["verify", str(tmp_path)]) == 1
    expected = f"error: {tmp_path}: holds no result files (*.h5); is this an --out folder?\n"
    assert capsys.readouterr().err == expected


def test_a_folder_that_is_not_there_is_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match="no such folder"):
        verify(tmp_path / "none")
    assert main(["verify", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path}/none: no such folder or file\n"


@pytest.mark.parametrize("rows", [255, 256, 257, 300, 511, 512, 513])
def test_a_changed_row_is_counted_once_however_many_rows_there_are(
    tmp_path: Path, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bioptimus.verify._SMALL_BYTES", 0)
    path = make_result(tmp_path / "out" / "tiny" / "a.h5", rows=rows + 1)
    with h5py.File(path, "r+") as file:
        assert len(file["features"]) == rows
        file["features"][100] += 1
    (found,) = problems(tmp_path / "out")
    assert "2 rows" not in found
    assert "row 100" in found


def test_results_of_several_kinds_in_one_folder_are_a_note(tmp_path: Path) -> None:
    def make(name: str, **parameters: Any) -> Path:
        parameters = {"slide quickhash": name, "overlap (px)": 0, "model sha256": "aa"} | parameters
        return make_result(
            tmp_path / name, attributes={"slide_quickhash": name, "model_sha256": "aa"},
            digest=digest_of(parameters), digest_parameters=parameters,
        )  # fmt: skip

    make("tiny/in/a.h5")
    make("tiny/z.h5")
    make("tissue/a.h5", **{"min tissue": 0.1})
    make("tissue/b.h5")
    assert notes(tmp_path) == [], "how tissue is found may differ from slide to slide"
    make("tiny/c.h5", **{"overlap (px)": 112, "tile mpp": 1.0})
    fact = (
        "holds results of 2 kinds, not to be used together: 2 files as in/a.h5 there, "
        "1 file as c.h5 here: overlap (px) is 0 there, 112 here; tile mpp is absent there, 1.0 here"
    )
    assert notes(tmp_path) == [f"tiny: {fact}"]
    make("tiny/d.h5", dtype="float16")
    assert notes(tmp_path)[0].endswith("1.0 here; 1 more kind")


@pytest.fixture
def hidden(out: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder within, which the system does not show."""
    folder = (out / "tiny" / "sub").rename(out / "tiny" / "a: b")
    scandir = os.scandir

    def refusing(path: Any) -> Any:
        if Path(path) == folder:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    return folder


def test_a_folder_that_cannot_be_looked_into_is_told(
    out: Path, hidden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    why = (
        f"{hidden}: cannot be looked into (Permission denied); check its permissions and the mount"
    )
    assert [finding.path for finding in verify(out).findings] == [hidden]
    assert main(["verify", str(out)]) == 1
    assert capsys.readouterr() == (f"{why}\n", "2 files, 610 tiles, 1 finding\n")
    commands = (
        ["convert", str(out), "--to", "npz", "--out", str(tmp_path / "npz")],
        ["view", str(out), "--overview", "--no-slide", "--out", str(tmp_path / "view")],
    )
    for words in commands:
        assert main(words) == 0
        assert capsys.readouterr().err == f"WARNING: {why}; what is in it is left out\n"
    assert write_html(out, tmp_path / "a.html") == 2


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (PermissionError(errno.EACCES, "Permission denied"), "Permission denied; check its permi"),
        (OSError(errno.EIO, "Input/output error"), "Input/output error; check its permissions"),
    ],
)
def test_what_the_system_refuses_is_not_called_damaged(
    out: Path, error: OSError, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = out / "tiny" / "a.h5"
    result = open_result(path)

    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(hdf5_image, "_looked_at", {})
    with pytest.raises(OutputError, match=f"a.h5: cannot be read: {words}"):
        _ = result.features
    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(OutputError, match=f"a.h5: cannot be read: {words}"):
        open_result(path)
