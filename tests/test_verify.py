from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from bioptimus.batch.inputs import find_inputs
from bioptimus.errors import OutputError
from bioptimus.verify import verify
from cli.main import main
from tests.result_files import make_result


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
    make_result(folder / "other" / "a.h5", rows=600)
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


def set_value(dataset: str, row: int, value: object) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        with h5py.File(path, "r+") as file:
            file[dataset][row] = value

    return damage


def set_attribute(name: str, value: object) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        with h5py.File(path, "r+") as file:
            file.attrs[name] = value

    return damage


def lose(dataset: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        with h5py.File(path, "r+") as file:
            del file[dataset]

    return damage


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (truncate, "cannot be read"),
        (set_attribute("complete", False), "is not complete"),
        (set_attribute("digest", "00"), "its digest is not that of its parameters"),
        (set_attribute("digest_parameters", '{"x": 1}'), "its digest is not that of"),
        (set_attribute("tiles_planned", 20), "has 11 rows and 1 failed tiles of 20 planned"),
        (set_attribute("tiles_failed", 2), "lists 1 failed tiles and says 2"),
        (set_attribute("state", "empty"), "has state empty with 12 tiles planned"),
        (set_attribute("mode", "embedding"), "has 3 predicted values in mode embedding"),
        (lose("features"), "has 0 embedding values in mode prediction_with_embedding"),
        (lose("coords"), "lacks the dataset coords"),
        (set_value("features", 5, np.nan), "has 1 rows of features with NaN or Inf"),
        (set_value("predictions", 0, np.inf), "has 1 rows of predictions with NaN or Inf"),
        (set_value("coords", 2, [0, 0]), "has two rows for one tile"),
        (set_value("coords", 2, [2240, 0]), "has 1 tiles whose corner is outside the slide"),
        (set_value("tissue_ratios", 2, np.nan), "has tissue ratios outside 0 to 1"),
    ],
)
def test_each_damage_is_found(tmp_path: Path, damage: Callable[[Path], None], words: str) -> None:
    path = make_result(tmp_path / "tiny" / "a.h5")
    assert problems(tmp_path) == []
    damage(path)
    found = problems(tmp_path)
    assert len(found) == 1
    assert found[0].startswith(f"tiny/a.h5: {words}")


def test_a_foreign_file_is_found(out: Path) -> None:
    with h5py.File(out / "tiny" / "x.h5", "w") as file:
        file["features"] = np.zeros((2, 2))
    assert problems(out)[0].startswith("tiny/x.h5: was not written by bioptimus")


def test_deep_reads_what_the_fast_check_leaves_out(out: Path) -> None:
    set_value("features", 300, np.nan)(out / "other" / "a.h5")
    assert problems(out) == []
    assert problems(out, deep=True) == ["other/a.h5: has 1 rows of features with NaN or Inf"]


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


def test_a_folder_that_is_not_there_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(OutputError, match="no such folder"):
        verify(tmp_path / "none")
    assert main(["verify", str(tmp_path / "none")]) == 1
    assert capsys.readouterr().err == f"error: {tmp_path}/none: no such folder\n"
