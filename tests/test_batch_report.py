"""The run's report keeps every line it took, whatever the disk does in between."""

import json
import os
import resource
import shutil
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from bioptimus.batch.claims import Claim, claim_path
from bioptimus.batch.report import RunFile, merge_reports, read_runs
from bioptimus.errors import OutputError
from bioptimus.jobs import SlideJob, SlideReport, SlideState, Timings
from bioptimus.report_html.collect import collect
from cli.main import main


@contextmanager
def room(size_bytes: int) -> Iterator[None]:
    """As on a full disk: a file grows to this size, the write that would pass it ends short."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def run_file(
    out: Path, *, model: str = "m", parameters: dict[str, object] | None = None
) -> RunFile:
    return RunFile(
        out,
        command=(),
        model=model,
        parameters=parameters or {},
        inputs={f"{name}.svs": f"{model}/{name}.h5" for name in "abc"},
        skipped=(),
        versions={},
    )


def test_line_that_a_full_disk_cut_short_is_told_and_spoils_no_other(tmp_path: Path) -> None:
    with closing(run_file(tmp_path)) as report:
        report.add(SlideReport(slide="a.svs", state="ok"))
        with room(report.path.stat().st_size + 40):
            for _ in range(2):
                with pytest.raises(OutputError, match=r"\.json: cannot be written: File too large"):
                    report.add(SlideReport(slide="b.svs", state="ok"))
        report.add(SlideReport(slide="c.svs", state="ok"))
    summary = read_runs(tmp_path)
    assert sorted(summary.slides) == [str(Path(name).absolute()) for name in ("a.svs", "c.svs")]
    assert summary.missing == ["b.svs"]


FAILED = SlideReport(slide="a.svs", state="failed", reason="no", seconds=Timings(total=1))
STOPPED = SlideReport(slide="a.svs", state="stopped", seconds=Timings(total=1))
NOT_STARTED = SlideReport(slide="a.svs", state="stopped", reason="not started")
HELD = SlideReport(slide="a.svs", state="skipped", reason="another job is at work on it")


def made(out: Path, state: SlideState) -> SlideReport:
    (out / "a.h5").touch()
    return SlideReport(
        slide="a.svs", state=state, output=str(out / "a.h5"), tiles_done=7 if state == "ok" else 0
    )


def test_report_that_was_removed_is_no_longer_written_in_silence(tmp_path: Path) -> None:
    with closing(run_file(tmp_path)) as run:
        run.add(SlideReport(slide="a.svs", state="ok"))
        shutil.rmtree(tmp_path / "runs")
        with pytest.raises(OutputError, match=r"\.json: is there no more; were results removed"):
            run.add(SlideReport(slide="b.svs", state="ok"))


@pytest.mark.parametrize(
    ("told", "counts"),
    [
        ((NOT_STARTED, FAILED), FAILED),
        ((FAILED, NOT_STARTED), FAILED),
        ((STOPPED, FAILED), FAILED),
        ((FAILED, STOPPED), STOPPED),
        (("ok", FAILED), FAILED),
        (("empty", FAILED), FAILED),
        (("ok", STOPPED), STOPPED),
        (("ok", FAILED, HELD), FAILED),
        (("ok", NOT_STARTED), "ok"),
        ((FAILED, "ok"), "ok"),
        (("ok", FAILED, "ok"), "ok"),
        # The first command once more: the result is there, and is its own.
        (("ok", FAILED, "skipped"), "ok"),
        (("empty", "skipped"), "empty"),
        ((FAILED, "skipped"), "skipped"),
    ],
)
def test_slide_is_as_its_last_outcome_says(
    told: tuple[SlideReport | SlideState, ...],
    counts: SlideReport | SlideState,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for each in told:
        with closing(run_file(tmp_path)) as run:
            run.add(each if isinstance(each, SlideReport) else made(tmp_path, each))
            # Another slide's news are its own.
            run.add(SlideReport(slide="b.svs", state="ok"))
            run.add(SlideReport(slide="c.svs", state="ok"))
    wanted = counts if isinstance(counts, SlideReport) else made(tmp_path, counts)
    found = read_runs(tmp_path).slides
    states = {Path(slide).stem: each["state"] for slide, each in found.items()}
    assert states == {"a": wanted.state, "b": "ok", "c": "ok"}
    (slide,) = (each for each in found.values() if each["slide"] == "a.svs")
    assert (slide["reason"], slide["tiles_done"]) == (wanted.reason, wanted.tiles_done)
    bad = wanted.state in ("failed", "stopped")
    assert main(["report", str(tmp_path), "--slides"]) == (1 if bad else 0)
    assert (f"{wanted.state}: a.svs: " in capsys.readouterr().out) == bad


def test_last_outcome_is_that_of_the_run_that_ended_the_slide_last(tmp_path: Path) -> None:
    """Two jobs side by side: the one that started first came to the slide after the other."""
    with closing(run_file(tmp_path)) as first, closing(run_file(tmp_path)) as second:
        second.add(FAILED)
        first.add(made(tmp_path, "ok"))
    assert [each["state"] for each in read_runs(tmp_path).slides.values()] == ["ok"]


def test_slide_is_the_same_however_a_run_named_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    named: list[tuple[str, SlideState]] = [("a.svs", "failed"), (f"{tmp_path}/./a.svs", "ok")]
    for slide, state in named:
        with closing(run_file(tmp_path)) as run:
            run.add(SlideReport(slide=slide, state=state))
    summary = read_runs(tmp_path)
    assert [each["state"] for each in summary.slides.values()] == ["ok"]
    assert summary.missing == ["b.svs", "c.svs"]
    assert [entry.state for entry in collect(tmp_path).slides] == ["ok", "missing", "missing"]
    # The same words in another folder are another slide.
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    with closing(run_file(tmp_path)) as run:
        run.add(SlideReport(slide="a.svs", state="failed"))
    summary = read_runs(tmp_path)
    assert sorted(each["state"] for each in summary.slides.values()) == ["failed", "ok"]


def test_slide_is_the_same_through_a_link_to_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path / "link")  # of which the shell's $PWD tells, and not the system
    named: list[tuple[str, SlideState]] = [
        ("a.svs", "failed"), ("b.svs", "ok"), ("c.svs", "failed"),
        (f"{tmp_path}/link/a.svs", "ok"), (f"{tmp_path}/real/c.svs", "ok"),
    ]  # fmt: skip
    for slide, state in named:
        with closing(run_file(tmp_path)) as run:
            run.add(SlideReport(slide=slide, state=state))
    summary = read_runs(tmp_path)
    assert [each["state"] for each in summary.slides.values()] == ["ok", "ok", "ok"]
    assert not summary.missing
    assert [entry.state for entry in collect(tmp_path).slides] == ["ok", "ok", "ok"]


def test_slide_that_moved_counts_once_as_its_new_place_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    runs: dict[str, dict[str, SlideState]] = {
        "old": {"a": "failed", "b": "ok"}, "new": {"a": "ok", "b": "skipped"},
    }  # fmt: skip
    for folder, states in runs.items():
        if folder == "old":
            (tmp_path / "old").mkdir()
            for name in "ab":
                (tmp_path / "old" / f"{name}.svs").touch()
        else:
            (tmp_path / "old").rename(tmp_path / "new")
        monkeypatch.chdir(tmp_path / folder)
        with closing(run_file(out)) as run:
            for name, state in states.items():
                output = "" if state == "failed" else str(out / "m" / f"{name}.h5")
                run.add(SlideReport(slide=f"{name}.svs", state=state, output=output))
    for name in "ab":
        (out / "m").mkdir(exist_ok=True)
        (out / "m" / f"{name}.h5").touch()
    found = read_runs(out)
    new = tmp_path / "new"
    assert {slide: each["state"] for slide, each in found.slides.items()} == {
        f"{new}/a.svs": "ok", f"{new}/b.svs": "skipped",
    }  # fmt: skip
    assert found.missing == ["c.svs", "c.svs"], "no run did it, at neither place"
    # Another slide whose result would have the same name is another slide.
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "a.svs").touch()
    assert read_runs(out).slides[str(tmp_path / "old" / "a.svs")]["state"] == "failed"


@pytest.mark.parametrize("out", ["ri", "results/ri"])
def test_slide_that_an_earlier_version_named_from_its_folder_is_the_same(
    out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with closing(run_file(Path(out), parameters={"out": out})) as run:
        run.add(SlideReport(slide="a.svs", state="failed"))
    lines = run.path.read_text().splitlines()
    begin = json.loads(lines[0])
    del begin["folder"]
    run.path.write_text("\n".join([json.dumps(begin), *lines[1:]]))
    monkeypatch.chdir("/")
    with closing(run_file(tmp_path / out)) as run:
        for name in ("a", "b", "c"):
            run.add(SlideReport(slide=f"{tmp_path}/{name}.svs", state="ok"))
    summary = read_runs(tmp_path / out)
    assert [each["state"] for each in summary.slides.values()] == ["ok", "ok", "ok"]
    assert summary.missing == ["a.svs", "b.svs", "c.svs"], "those of the second run, in /"


def test_slide_that_one_model_did_is_not_done_by_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs: dict[str, tuple[SlideState, ...]] = {"m": ("ok", "ok", "ok"), "n": ("failed", "ok")}
    for model, states in runs.items():
        with closing(run_file(tmp_path, model=model)) as run:
            for slide, state in zip("abc", states, strict=False):
                run.add(SlideReport(slide=f"{slide}.svs", state=state, reason="a.svs: is odd"))
    assert main(["report", str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "failed: a.svs (n): is odd",
        "missing: c.svs (n): no run accounted for it; run the same command again",
        "2 runs: 1 failed, 4 ok, 1 missing; 0 tiles",
    ]


def test_result_that_has_gone_is_no_done_slide_and_one_that_moved_with_its_folder_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with closing(run_file(Path("out"))) as run:
        for name in "abc":
            output = Path("out", "m", f"{name}.h5")
            output.parent.mkdir(exist_ok=True)
            output.touch()
            run.add(SlideReport(slide=f"{name}.svs", state="ok", output=str(output)))
    assert {each["state"] for each in read_runs(Path("out")).slides.values()} == {"ok"}
    moved = Path("out").rename("moved").absolute()
    monkeypatch.chdir("/")
    assert {each["state"] for each in read_runs(moved).slides.values()} == {"ok"}
    (moved / "m" / "b.h5").unlink()
    found = [(each["state"], each["reason"]) for each in read_runs(moved).slides.values()]
    assert found == [("ok", ""), ("failed", "the result file is not there any more"), ("ok", "")]
    assert main(["report", str(moved)]) == 1


def test_account_of_the_file_that_is_there_counts_where_folders_were_brought_together(
    tmp_path: Path,
) -> None:
    output = tmp_path / "m" / "a.h5"
    output.parent.mkdir()
    output.touch()
    written = []
    for tiles in (50, 209):
        with closing(run_file(tmp_path)) as run:
            written.append(time.time())
            report = SlideReport(slide="a.svs", state="ok", output=str(output), tiles_done=tiles)
            run.add(report)
    for age, tiles in ((written[0], 50), (written[1], 209), (written[1] + 3600, 209)):
        os.utime(output, (age, age))
        (record,) = read_runs(tmp_path).slides.values()
        assert record["tiles_done"] == tiles


def test_every_slide_and_where_its_time_went_are_listed_when_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with closing(run_file(tmp_path)) as run:
        output = tmp_path / "a.h5"
        output.touch()
        seconds = Timings(open=0.25, read=1.5, wait=2, forward=13.5, total=4)
        run.add(
            SlideReport(slide="a.svs", state="ok", output=str(output), tiles_done=1200,
                        seconds=seconds)
        )  # fmt: skip
        run.add(SlideReport(slide="b.svs", state="failed", reason="b.svs: is odd", tiles_failed=3))
    assert main(["report", str(tmp_path), "--slides"]) == 1
    heads, *lines = (line.split() for line in capsys.readouterr().out.splitlines())
    assert [word for word in heads if word != "s"] == [
        *("state", "tiles", "failed", "tiles/s", "total", "open", "tissue", "read", "wait"),
        *("forward", "write", "slide"),
    ]
    ok, failed = lines[:2]
    assert ok == [
        *("ok", "1200", "0", "300", "4.0", "0.2", "0.0", "1.5", "2.0", "13.5", "0.0"),
        str(Path("a.svs").absolute()),
    ]
    assert (failed[0], failed[2], failed[-1]) == ("failed", "3", str(Path("b.svs").absolute()))
    assert lines[2] == ["failed:", "b.svs:", "is", "odd"]


def test_a_folder_without_runs_is_told_with_what_to_do(tmp_path: Path) -> None:
    out, model = tmp_path / "my out", tmp_path / "my out" / "m"
    model.mkdir(parents=True)
    with pytest.raises(OutputError, match=r"json here; give the folder that --out named$"):
        read_runs(out)
    (model / "a.h5").touch()
    with pytest.raises(OutputError, match=r"looked at by: bioptimus verify '.*/my out'$"):
        read_runs(out)
    run_file(out).close()
    with pytest.raises(OutputError, match=f"give the folder above it, {out}, that --out named$"):
        read_runs(model)


def test_slide_that_failed_on_one_device_is_not_called_stopped_for_the_other() -> None:
    job = SlideJob(path=Path("a.svs"), output=Path("a.h5"), name="a.svs")
    for reports in ((FAILED, NOT_STARTED), (NOT_STARTED, FAILED)):
        (merged,) = merge_reports(reports, [job], dead=())
        assert merged.state == "failed"


def test_claim_that_a_full_disk_cut_short_is_not_taken(tmp_path: Path) -> None:
    with room(40), pytest.raises(OutputError, match=r"cannot claim this slide: File too large; "):
        Claim.take(tmp_path / "x.h5")
    assert not claim_path(tmp_path / "x.h5").exists()
