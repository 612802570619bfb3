"""The HTML report: what it tells, and that it works in a real browser."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from bioptimus.errors import OutputError, UsageError
from bioptimus.report_html import write_html
from bioptimus.report_html.collect import SlideEntry, collect
from bioptimus.report_html.page import render
from bioptimus.report_html.pictures import SlidePicture, draw_all, paint_over, picture_side
from bioptimus.tiles import TileSpec
from bioptimus.view.source import open_source
from cli.main import main
from tests.result_files import Sample, damage, sample_slide, write_result

NO_MPP = "no mpp in its metadata; pass --mpp-override"
HOSTILE = 'x"><script>alert(1)<!--&.svs'


@pytest.fixture(scope="module")
def sample() -> Sample:
    root = Path(__file__).resolve().parent.parent
    return sample_slide(
        root / "examples" / "CMU-1-Small-Region.svs", tile=TileSpec(size_px=224), fail=1
    )


def record(slide: str, state: str = "ok", **more: Any) -> dict[str, Any]:
    return {
        "kind": "slide",
        "slide": slide,
        "state": state,
        "reason": "",
        "tiles_planned": 0,
        "tiles_done": 0,
        "tiles_failed": 0,
        "mpp": None,
        "output": "",
        "host": "node17",
        "job": "8812_3",
        "seconds": {"open": 0.1, "total": 1.5},
        "tiles_per_second": 0.0,
    } | more


def write_run(
    out: Path,
    name: str,
    slides: list[str],
    records: list[dict[str, Any]],
    *,
    model: str = "lite0",
) -> None:
    head = {
        "kind": "run",
        "run": name,
        "command": ["bioptimus", "embed", "slides"],
        "started": f"2026-01-0{len(name)}T00:00:00+00:00",
        "host": "node17",
        "parameters": {"model": model, "min_tissue": 0.5},
        "versions": {"torch": "2.13.0"},
    }
    inputs = {
        "kind": "inputs",
        "slides": slides,
        "skipped": [{"path": "slides/notes.txt", "reason": "not a slide"}],
    }
    (out / "runs").mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(each) for each in (head, inputs, *records)]
    (out / "runs" / f"{name}.json").write_text("\n".join(lines) + "\n")


@pytest.fixture
def out(sample: Sample, tmp_path: Path) -> Path:
    """A run of seven slides: three done (one in two folders each), one empty, two failed,
    one never reached."""
    folder = tmp_path / "out"
    records = []
    for number, name in enumerate(("a/one.svs", "b/one.svs", "b/two.svs")):
        path = folder / "lite0" / Path(name).with_suffix(".h5")
        part = slice(number * 10, None)
        assert sample.features is not None
        smaller = replace(
            sample,
            coords=sample.coords[part],
            features=sample.features[part],
            predictions=None,
            slide=Path("slides") / name,
        )
        write_result(path, smaller)
        done = len(smaller.coords)
        records.append(
            record(
                f"slides/{name}",
                tiles_planned=done + 1,
                tiles_done=done,
                tiles_failed=1,
                mpp=[0.499, 0.499],
                output=str(path),
                tiles_per_second=50.0 + number,
            )
        )
    blank = replace(
        sample,
        coords=np.zeros((0, 2), np.int64),
        features=np.zeros((0, 5), np.float32),
        predictions=None,
        failed=np.zeros((0, 2), np.int64),
        slide=Path("slides/blank.tif"),
    )
    path = write_result(folder / "lite0" / "blank.h5", blank)
    records.append(record("slides/blank.tif", "empty", reason="no tissue", output=str(path)))
    records.append(record("slides/no.svs", "failed", reason=f"no.svs: {NO_MPP}"))
    records.append(record(f"slides/{HOSTILE}", "failed", reason=f"{HOSTILE}: {NO_MPP}"))
    slides = [each["slide"] for each in records] + ["slides/later.svs"]
    write_run(folder, "1", slides, records)
    return folder


def entry(folder: Path, slide: str) -> SlideEntry:
    (found,) = [each for each in collect(folder).slides if each.slide == slide]
    return found


def test_a_folder_that_is_called_like_a_result_is_no_slide(out: Path) -> None:
    slides = len(collect(out).slides)
    (out / "lite0" / "odd.h5").mkdir()
    assert len(collect(out).slides) == slides


def test_every_input_has_a_row_and_its_state(out: Path) -> None:
    states = {each.slide: each.state for each in collect(out).slides}
    assert states == {
        "slides/a/one.svs": "ok",
        "slides/b/one.svs": "ok",
        "slides/b/two.svs": "ok",
        "slides/blank.tif": "empty",
        "slides/no.svs": "failed",
        f"slides/{HOSTILE}": "failed",
        "slides/later.svs": "missing",
    }
    assert collect(out).skipped == {"slides/notes.txt": "not a slide"}


def test_facts_of_the_file_join_those_of_the_report(out: Path) -> None:
    found = entry(out, "slides/b/two.svs")
    assert found.model == "lite0"
    assert found.tiles_per_second == 52
    assert found.failed_tiles[0][2:] == ("read", "Bogus marker length")
    assert found.host == "node17"


def test_a_later_failure_is_told_though_the_file_of_before_is_there(out: Path) -> None:
    # What names the slide in the file is its absolute path.
    slide = "slides/a/one.svs"
    write_run(out, "22", [slide], [record(slide, "failed", reason="x")])
    assert entry(out, slide).state == "failed"  # and there is no second row from the file
    assert len(collect(out).slides) == 7
    write_run(out, "333", [slide], [record(slide, output=str(out / "lite0" / "a" / "one.h5"))])
    assert entry(out, slide).state == "ok"


def test_slides_that_failed_under_two_models_are_two_rows(out: Path) -> None:
    write_run(out, "22", [], [record("slides/no.svs", "failed", reason="y")], model="h0")
    found = [each for each in collect(out).slides if each.slide == "slides/no.svs"]
    assert [(each.model, each.state) for each in found] == [("lite0", "failed"), ("h0", "failed")]


def test_a_later_success_replaces_a_failure(out: Path, sample: Sample) -> None:
    path = write_result(out / "lite0" / "no.h5", replace(sample, slide=Path("slides/no.svs")))
    write_run(out, "22", ["slides/no.svs"], [record("slides/no.svs", output=str(path))])
    assert entry(out, "slides/no.svs").state == "ok"


def test_a_run_stopped_before_it_came_to_a_slide_says_nothing_about_it(out: Path) -> None:
    not_started = record("slides/no.svs", "stopped", seconds={"total": 0.0})
    write_run(out, "22", ["slides/no.svs"], [not_started])
    assert entry(out, "slides/no.svs").state == "failed"


def test_a_skip_says_nothing_new_about_a_finished_slide(out: Path) -> None:
    first = entry(out, "slides/a/one.svs")
    write_run(
        out,
        "22",
        ["slides/a/one.svs"],
        [record("slides/a/one.svs", "skipped", output=str(first.output))],
    )
    assert entry(out, "slides/a/one.svs").tiles_per_second == first.tiles_per_second


def test_tiles_of_a_slide_that_is_only_known_as_done_are_those_of_its_file(out: Path) -> None:
    first = entry(out, "slides/a/one.svs")
    (out / "runs" / "1.json").unlink()
    found = record("slides/a/one.svs", "skipped", output=str(first.output))
    write_run(out, "22", ["slides/a/one.svs"], [found])
    again = entry(out, "slides/a/one.svs")
    assert first.tiles_done
    assert (again.tiles_done, again.tiles_failed) == (first.tiles_done, first.tiles_failed)


def test_a_result_that_has_gone_is_a_failure(out: Path) -> None:
    (out / "lite0" / "a" / "one.h5").unlink()
    found = entry(out, "slides/a/one.svs")
    assert found.state == "failed"
    assert "not there any more" in found.reason


def test_a_damaged_result_is_a_failure_with_its_reason(out: Path) -> None:
    path = out / "lite0" / "a" / "one.h5"
    path.write_bytes(path.read_bytes()[:3000])
    found = entry(out, "slides/a/one.svs")
    assert found.state == "failed"
    assert "one.h5" in found.reason


def test_a_folder_moved_elsewhere_still_has_its_results(out: Path, tmp_path: Path) -> None:
    moved = tmp_path / "archive" / "renamed"
    moved.parent.mkdir()
    shutil.move(out, moved)
    assert entry(moved, "slides/b/two.svs").state == "ok"


@pytest.mark.parametrize("folder", [".", "out", ""])
def test_a_copy_counts_what_it_holds_and_not_what_its_original_does(
    out: Path, folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Whether the original was named by its path, from beside it or from within."""
    if folder:
        monkeypatch.chdir(out if folder == "." else out.parent)
        account = out / "runs" / "1.json"
        within = f"{out}/" if folder == "." else f"{out.parent}/"
        account.write_text(account.read_text().replace(within, ""))
    told = {each.slide: (each.state, each.tiles_done) for each in collect(out).slides}
    copy = tmp_path / "copy"
    shutil.copytree(out, copy)
    found = collect(copy).slides
    assert {each.slide: (each.state, each.tiles_done) for each in found} == told
    assert len(found) == len(told) == 7
    assert all(each.output.is_relative_to(copy) for each in found if each.output)
    (copy / "lite0" / "a" / "one.h5").unlink()
    assert entry(copy, "slides/a/one.svs").state == "failed"
    assert main(["report", str(copy), "--json"]) == 1
    slides = json.loads(capsys.readouterr().out)["slides"]
    (lost,) = [each for slide, each in slides.items() if slide.endswith("slides/a/one.svs")]
    (kept,) = [each for slide, each in slides.items() if slide.endswith("slides/b/one.svs")]
    assert (lost["state"], kept["state"]) == ("failed", "ok")
    assert kept["output"] == str(copy / "lite0" / "b" / "one.h5")


def test_attributes_of_another_kind_are_no_hindrance(sample: Sample, tmp_path: Path) -> None:
    with h5py.File(write_result(tmp_path / "a.h5", sample), "r+") as file:
        file.attrs["warnings"] = 5
        file.attrs["tiles_planned"] = "many"
    (slide,) = collect(tmp_path).slides
    assert (slide.state, slide.warnings, slide.tiles_planned) == ("ok", (), None)


def test_results_without_any_report_are_listed(out: Path) -> None:
    shutil.rmtree(out / "runs")
    assert {each.state for each in collect(out).slides} == {"ok", "empty"}
    assert len(collect(out).slides) == 4


def test_files_of_other_tools_in_the_folder_are_passed_over(out: Path) -> None:
    with h5py.File(out / "converted.h5", "w") as file:
        file["features"] = np.zeros((3, 4))
    assert len(collect(out).slides) == 7


def test_two_models_on_one_slide_are_two_rows(out: Path, sample: Sample) -> None:
    slide = "slides/b/two.svs"
    path = write_result(out / "h0" / "b" / "two.h5", replace(sample, slide=Path(slide)))
    other = [record(slide, output=str(path)), record("slides/a/one.svs", "failed", reason="x")]
    write_run(out, "22", [slide, "slides/a/one.svs"], other, model="h0")
    rows = [(each.slide, each.state) for each in collect(out).slides]
    assert rows.count((slide, "ok")) == 2
    assert rows.count(("slides/a/one.svs", "ok")) == 1
    assert rows.count(("slides/a/one.svs", "failed")) == 1, "one model's success hides no failure"


def test_a_line_of_another_program_is_passed_over(
    out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(out)]) == 1
    before = capsys.readouterr().out
    lines = ("[1, 2]", "7", '{"kind": "slide"}', '{"kind": "inputs"}', '{"kind": ["a"]}', "{}")
    strange = json.dumps(record("slides/x.svs", "melted"))
    (out / "runs" / "other.json").write_text("\n".join([*lines, strange]))
    assert main(["report", str(out)]) == 1
    assert capsys.readouterr().out == before
    assert main(["report", str(out), "--html", str(tmp_path / "page.html")]) == 1


def test_a_line_cut_short_by_a_kill_is_passed_over(out: Path) -> None:
    path = out / "runs" / "1.json"
    path.write_text(path.read_text() + '{"kind": "sli')
    assert len(collect(out).slides) == 7


def test_many_reasons_do_not_bury_the_table(out: Path) -> None:
    slides = [f"slides/{number}.svs" for number in range(9)]
    records = [record(slide, "failed", reason=f"{slide}: fault {slide}") for slide in slides]
    write_run(out, "22", slides, records)
    text = render(collect(out), {})
    listed = text.split('class="failures"')[1].split("</section>")[0]
    assert listed.count("<strong>") == 5
    assert NO_MPP in listed, "the most frequent reason comes first"
    assert "6 more reasons" in listed


def test_a_folder_that_holds_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="neither result files nor"):
        write_html(tmp_path, tmp_path / "a.html")
    with pytest.raises(UsageError, match="no such folder"):
        write_html(tmp_path / "gone", tmp_path / "a.html")


def test_what_stands_in_the_place_of_a_page_is_called_what_it_is(out: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(OutputError, match=r"/folder: is a folder, and a file is to be written"):
        write_html(out, tmp_path / "folder", pictures=False)
    with pytest.raises(OutputError, match=r"/file: is a file, and a folder is to be there"):
        write_html(out, tmp_path / "file" / "a.html", pictures=False)


def test_a_page_that_cannot_be_written_is_an_output_error(out: Path, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot be written: File name too long; mend"):
        write_html(out, tmp_path / f"{'a' * 250}.html", pictures=False)


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.scripts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        self.links += [value or "" for key, value in attrs if key in ("src", "href", "action")]


def test_the_page_fetches_nothing_and_runs_no_foreign_script(out: Path, tmp_path: Path) -> None:
    write_html(out, tmp_path / "a.html")
    text = (tmp_path / "a.html").read_text()
    page = _Links()
    page.feed(text)
    assert page.links
    assert all(link.startswith("data:") for link in page.links)
    assert page.scripts == 1, "the slide's name must not have become an element"
    assert not re.search(r"url\(|@import|https?://", text)


def test_pictures_stay_bounded_for_thousands_of_slides(sample: Sample, tmp_path: Path) -> None:
    assert [picture_side(count) for count in (1, 40, 41, 3000, 100_000)] == [420, 420, 280, 112, 72]
    out = tmp_path / "out"
    path = write_result(out / "a.h5", replace(sample, slide=Path("a.svs")))
    run = collect(out)
    many = replace(run, slides=tuple(replace(run.slides[0], output=path) for _ in range(3001)))
    pictures = next(iter(draw_all(replace(many, slides=many.slides[:1])).values()))
    assert len(pictures.thumbnail) + len(pictures.embedding) < 60_000
    entries = tuple(replace(run.slides[0], slide=f"{n}.svs") for n in range(3001))
    tiny = SlidePicture(thumbnail="data:,", embedding="data:,")
    text = render(replace(run, slides=entries), {entry.key: tiny for entry in entries})
    assert len(text) < 3001 * 4_000, "what is not a picture takes 4 kB a slide at most"


def test_the_embedding_map_lies_on_the_thumbnail(sample: Sample, tmp_path: Path) -> None:
    source = open_source(write_result(tmp_path / "a.h5", sample))
    ground = np.zeros((297, 222, 3), np.uint8)
    picture = paint_over(
        ground, source, np.full((len(source), 3), 255, np.uint8), (10.0, 2967 / 297)
    )
    wanted = np.zeros((297, 222), bool)
    side = source.tile_level0[0] / 10
    for x, y in sample.coords / 10:
        wanted[round(y) : round(y + side), round(x) : round(x + side)] = True
    # Corners are rounded to pixels here, so a border may be off by one.
    assert ((picture[..., 0] == 255) != wanted).mean() < 0.01


@pytest.fixture(scope="session")
def browser() -> Callable[[Path, int], str]:
    """Loads a page in headless Chromium and gives back the DOM that its scripts left."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("needs Chromium (Debian's package chromium)")

    def load(page: Path, width_px: int) -> str:
        profile = page.parent / "profile"
        done = subprocess.run(
            [
                program,
                "--headless",
                *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
                *("--disable-background-networking", "--disable-component-update"),
                *("--disable-sync", "--disable-dev-shm-usage"),
                f"--user-data-dir={profile}",
                "--enable-logging=stderr",
                "--virtual-time-budget=4000",
                f"--window-size={width_px},900",
                "--dump-dom",
                page.as_uri(),
            ],
            capture_output=True,
            text=True,
            timeout=90,
            check=True,
            env=os.environ | {"HOME": str(page.parent)},
        )
        shouted = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
        assert shouted == [], "the console stays empty"
        return done.stdout

    return load


# Runs in the page after its own script and leaves what it saw in an element.
_ACT = """
const log = {};
const opens = () => [...document.querySelectorAll("tr.slide:not([hidden]) button.open")];
const names = () => opens().map((button) => button.textContent);
const key = (key) => (document.activeElement || document.body).dispatchEvent(
  new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
const head = (name) => document.querySelector(`th button[data-sort="${name}"]`);
log.first = names();
const order = (name) => head(name).closest("th").ariaSort;
head("tiles").click(); log.tiles = names(); log.tilesSort = order("tiles");
head("tiles").click(); log.tilesUp = names(); log.tilesUpSort = order("tiles");
head("slide").click(); log.slide = names();
document.querySelector('.chip[data-state="failed"]').click(); log.failed = names();
log.status = document.getElementById("shown").textContent;
document.querySelector('.chip[data-state="failed"]').click();
key("/"); log.focus = document.activeElement.id;
const find = document.getElementById("find");
find.value = "B/ tWo"; find.dispatchEvent(new Event("input")); log.found = names();
find.value = "zzz"; find.dispatchEvent(new Event("input")); log.nothing = names();
log.nothingShown = !document.getElementById("nothing").hidden;
key("Escape"); log.cleared = names().length;
find.focus(); key("ArrowDown"); log.arrow = document.activeElement.textContent;
key("ArrowDown"); log.arrow2 = document.activeElement.textContent;
head("speed").click();
const open = document.querySelector("tr.slide button.open"); open.click();
const detail = document.getElementById(open.getAttribute("aria-controls"));
log.detail = [detail.hidden, detail.textContent.includes("Bogus marker length"),
  detail.querySelectorAll(".large img").length, open.getAttribute("aria-expanded")];
open.click(); log.closed = detail.hidden;
log.images = [...document.images].every((image) => image.complete && image.naturalWidth > 0);
const said = document.body.appendChild(document.createElement("pre"));
said.id = "log";
said.textContent = JSON.stringify(log);
"""


def test_sorting_filtering_and_keys_work_in_a_browser(
    out: Path, tmp_path: Path, browser: Callable[[Path, int], str]
) -> None:
    page = tmp_path / "page.html"
    write_html(out, page)
    # Pictures are decoded by the time the page has loaded; the test acts after that.
    script = f"<script>window.addEventListener('load', () => {{{_ACT}}});</script></body>"
    page.write_text(page.read_text().replace("</body>", script))
    seen = re.search(r'<pre id="log">(.*?)</pre>', browser(page, 1280), re.DOTALL)
    assert seen, "the script ran to its end"
    log = json.loads(unescape(seen[1]))
    failed = [HOSTILE, "no.svs"]
    assert log["first"][:3] == ["no.svs", HOSTILE, "later.svs"], "what is not done comes first"
    assert log["tiles"][:3] == ["a/one.svs", "b/one.svs", "b/two.svs"]
    assert log["tilesSort"] == "descending"
    assert log["tilesUp"][:2] == ["blank.tif", "b/two.svs"]
    assert log["tilesUp"][-3:] == log["tiles"][-3:], "what is not known stays last"
    assert log["tilesUpSort"] == "ascending"
    assert log["slide"][0] == "blank.tif"
    assert sorted(log["failed"]) == sorted(failed)
    assert log["status"] == "2 of 7 slides"
    assert log["focus"] == "find"
    assert log["found"] == ["b/two.svs"]
    assert log["nothing"] == []
    assert log["nothingShown"]
    assert log["cleared"] == 7
    assert [log["arrow"], log["arrow2"]] == log["slide"][:2]
    assert log["detail"] == [False, True, 2, "true"]
    assert log["closed"]
    assert log["images"]


@pytest.mark.parametrize("width_px", [500, 922, 1600])
def test_nothing_scrolls_sideways_on_a_phone_or_a_desk(
    out: Path, tmp_path: Path, browser: Callable[[Path, int], str], width_px: int
) -> None:
    page = tmp_path / "page.html"
    write_html(out, page, pictures=width_px == 922)
    script = (
        "<script>for (const open of document.querySelectorAll('button.open')) open.click();"
        "document.title = document.documentElement.scrollWidth - window.innerWidth;</script></body>"
    )
    page.write_text(page.read_text().replace("</body>", script))
    seen = re.search(r"<title>(-?\d+)</title>", browser(page, width_px))
    assert seen
    assert int(seen[1]) <= 0


def test_a_folder_that_is_not_there_is_wrong_usage_and_one_without_runs_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    assert main(["report", str(gone)]) == 2
    words = f"error: {gone}: no such folder; give the one that --out named\n"
    assert capsys.readouterr().err == words
    assert main(["report", str(tmp_path)]) == 1
    assert "give the folder that --out named" in capsys.readouterr().err
    for place in (tmp_path, gone.with_name("file") / "page.html"):
        gone.with_name("file").touch()
        assert main(["report", str(tmp_path), "--html", str(place)]) == 2
        assert capsys.readouterr().err.startswith(f"error: --html {place}"[:30])


def test_damaged_files_are_told_and_the_page_shows_the_others(
    sample: Sample, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in "abc":
        slide = replace(sample, slide=Path(f"{name}.svs"))
        write_result(tmp_path / "out" / "lite0" / f"{name}.h5", slide)
    damage(tmp_path / "out" / "lite0" / "a.h5", "features")
    damage(tmp_path / "out" / "lite0" / "b.h5", "tissue_mask")
    page = tmp_path / "report.html"
    assert write_html(tmp_path / "out", page) == 3
    told = [line for line in caplog.messages if "no picture of it" in line]
    assert ["a.h5" in line for line in told].count(True) == 1
    assert all("has other values in" in line for line in told)
    assert page.read_text().count("data:image/webp") == 2
