"""Every path given becomes a slide, a skipped file with its reason, or an error: never nothing."""

import io
import os
import re
import shutil
import struct
from collections.abc import Sequence
from pathlib import Path, PurePath

import pytest

from bioptimus.batch.inputs import (
    Inputs,
    SlideInput,
    find_inputs,
    output_path,
    strip_extension,
)
from bioptimus.batch.lists import write_list
from bioptimus.errors import UsageError
from bioptimus.io.companions import companions


def touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")


def names(inputs: Inputs) -> list[str]:
    return [slide.relative.as_posix() for slide in inputs.slides]


def reasons(inputs: Inputs) -> dict[str, str]:
    return {skipped.path.name: skipped.reason for skipped in inputs.skipped}


def results(inputs: Inputs) -> list[str]:
    return [output_path(Path("out"), "lite0", s).as_posix() for s in inputs.slides]


def dicom_file(
    path: Path, *, series: str, modality: str = "SM", implicit: bool = False, padding: int = 0
) -> None:
    """Write the beginning of a DICOM file, with sequences of undefined length before the series."""

    def element(group: int, number: int, kind: bytes, value: bytes) -> bytes:
        value += b"\0" * (len(value) % 2)
        tag = struct.pack("<HH", group, number)
        if group != 2 and implicit:
            return tag + struct.pack("<I", len(value)) + value
        if kind in (b"OB", b"SQ"):
            return tag + kind + b"\0\0" + struct.pack("<I", len(value)) + value
        return tag + kind + struct.pack("<H", len(value)) + value

    def open_sequence(group: int, number: int, content: bytes) -> bytes:
        head = struct.pack("<HH", group, number) + (b"" if implicit else b"SQ\0\0")
        item = struct.pack("<HHI", 0xFFFE, 0xE000, 0xFFFFFFFF) + content
        item += struct.pack("<HHI", 0xFFFE, 0xE00D, 0)
        return head + b"\xff" * 4 + item + struct.pack("<HHI", 0xFFFE, 0xE0DD, 0)

    syntax = b"1.2.840.10008.1.2" if implicit else b"1.2.840.10008.1.2.1"
    # The inner element has the series' tag: only the outermost one counts.
    inner = element(0x0020, 0x000E, b"UI", b"9.9.9")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        b"\0" * 128
        + b"DICM"
        + element(0x0002, 0x0010, b"UI", syntax)
        + element(0x0008, 0x0060, b"CS", modality.encode())
        + open_sequence(0x0008, 0x1115, open_sequence(0x0008, 0x1140, inner))
        + element(0x0009, 0x0010, b"OB", b"\1" * padding)
        + element(0x0020, 0x000E, b"UI", series.encode())
        + element(0x0028, 0x0010, b"US", b"\0\1")
    )


def test_folder_is_searched_to_the_bottom_and_each_other_file_is_listed_with_a_reason(
    tmp_path: Path,
) -> None:
    touch(
        tmp_path / "b.SVS",
        tmp_path / "a" / "deep er" / "é漢.ndpi",
        tmp_path / "notes.xlsx",
        tmp_path / "figure.png",
        tmp_path / "scan.vsi",
        tmp_path / "_scan_" / "stack1" / "frame_t.ets",
        tmp_path / "._b.svs",
        tmp_path / ".cache" / "c.svs",
    )
    inputs = find_inputs([str(tmp_path)])
    assert names(inputs) == ["b.SVS", "a/deep er/é漢.ndpi"]
    assert results(inputs) == ["out/lite0/b.h5", "out/lite0/a/deep er/é漢.h5"]
    told = reasons(inputs)
    assert told.pop("scan.vsi").startswith("Olympus/Evident format that OpenSlide cannot read")
    assert told == {
        "notes.xlsx": "unknown extension",
        "figure.png": "picture; taken only when named",
        "_scan_": "companion: data of the .vsi file beside it",
        "._b.svs": "hidden",
        ".cache": "hidden",
    }


def test_link_that_goes_while_a_folder_is_searched_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touch(tmp_path / "a.svs")
    (tmp_path / "b.svs").symlink_to("gone")
    readlink = os.readlink

    def gone(path: Path) -> str:
        Path(path).unlink(missing_ok=True)
        return readlink(path)

    monkeypatch.setattr(os, "readlink", gone)
    slides = find_inputs([tmp_path]).slides
    assert [s.problem for s in slides] == [None, "no such file; check the path"]


def test_picture_that_is_named_besides_its_folder_is_not_told_as_left_out(tmp_path: Path) -> None:
    touch(tmp_path / "a.svs", tmp_path / "b.png", tmp_path / "c.png")
    inputs = find_inputs([tmp_path, tmp_path / "b.png"])
    assert names(inputs) == ["a.svs", "b.png"]
    assert list(reasons(inputs)) == ["c.png"]


@pytest.mark.parametrize(
    ("name", "stem"),
    [
        ("a.svs", "a"),
        ("a.OME.TIFF", "a"),
        ("a.ome.tif", "a"),
        ("TCGA-05-4244-01Z-00-DX1.d4ff32cd.svs", "TCGA-05-4244-01Z-00-DX1.d4ff32cd"),
        ("a.svs.tif", "a.svs"),
        ("1.2.840.10008.7", "1.2.840.10008.7"),
        ("a.b", "a.b"),
        (".svs", ".svs"),
    ],
)
def test_exactly_one_known_extension_is_stripped(name: str, stem: str) -> None:
    assert strip_extension(name) == stem
    slide = SlideInput(path=Path("/d") / name, relative=PurePath("sub") / name)
    assert output_path(Path("o"), "my model/1", slide) == Path(f"o/my-model-1/sub/{stem}.h5")


def test_picture_and_unknown_extension_are_taken_when_named(tmp_path: Path) -> None:
    touch(tmp_path / "a.png", tmp_path / "b.xyz")
    inputs = find_inputs([tmp_path / "a.png", tmp_path / "b.xyz"])
    assert results(inputs) == ["out/lite0/a.h5", "out/lite0/b.xyz.h5"]


def test_missing_named_path_is_a_failing_slide_and_not_the_end_of_the_run(tmp_path: Path) -> None:
    touch(tmp_path / "good.svs", tmp_path / "scan.vsi")
    (tmp_path / "loose.svs").symlink_to(tmp_path / "nowhere.svs")
    wanted = ["gone.svs", "good.svs", "loose.svs", "scan.vsi"]
    inputs = find_inputs([tmp_path / name for name in wanted])
    problems = [slide.problem for slide in inputs.slides]
    assert problems[0] == "no such file; check the path"
    assert problems[1] is None
    assert problems[2] == (
        f"a link to {tmp_path}/nowhere.svs, which is not there; mount or copy the target"
    )
    assert "convert it to OME-TIFF" in (problems[3] or "")


@pytest.mark.parametrize("name", ["a\0b.svs", "n" * 300 + ".svs", "n" * 300 + ".mrxs"])
@pytest.mark.parametrize("column", [True, False])
def test_line_that_names_no_possible_file_is_a_failing_slide_and_the_others_run(
    name: str, column: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touch(tmp_path / "good.svs")
    monkeypatch.chdir(tmp_path)
    text = f"slide\n{name}\ngood.svs\n" if column else f"{name}\ngood.svs\n"
    Path("l.csv").write_text(text)
    found = find_inputs(["l.csv"]) if column else find_inputs(["-"], stdin=io.StringIO(text))
    bad, good = found.slides
    assert good.problem is None
    assert bad.problem in (
        "its path holds a NUL byte; correct the list",
        "its name is too long for any file; check the path",
    )
    assert (bad.size(), good.size()) == (0, 1)
    write_list(Path("frozen.csv"), found.slides)
    assert [s.problem for s in find_inputs(["frozen.csv"]).slides] == [bad.problem, None]


def test_name_that_is_no_utf8_passes_through_a_frozen_list(tmp_path: Path) -> None:
    name = os.fsdecode(b"a\xff.svs")
    touch(tmp_path / name)
    (slide,) = find_inputs([tmp_path]).slides
    write_list(tmp_path / "frozen.csv", [slide])
    (again,) = find_inputs([tmp_path / "frozen.csv"]).slides
    assert (again.path.name, again.problem) == (name, slide.problem)
    assert "not in UTF-8" in (slide.problem or "")


def test_paths_that_end_in_nul_are_taken_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = ["a.svs", "b\n.svs", " c.svs", "#d.svs", "e" * 200 + ".svs"]
    touch(*(tmp_path / name for name in wanted))
    monkeypatch.chdir(tmp_path)
    # More than a cell of a CSV can hold, and no line end.
    listed = "".join(f"{name}\0" for name in wanted * 700)
    found = find_inputs(["-"], stdin=io.StringIO(listed))
    assert [str(slide.path) for slide in found.slides] == wanted
    assert all(slide.problem is None for slide in found.slides)


@pytest.mark.parametrize("fill", [(), ("a.txt", "b.txt", "c.vsi")])
def test_folder_without_slides_stops_the_run_and_says_what_was_there(
    tmp_path: Path, fill: Sequence[str]
) -> None:
    touch(*(tmp_path / name for name in fill))
    with pytest.raises(UsageError, match="no slides in this folder") as caught:
        find_inputs([tmp_path])
    assert ("3 skipped: 2 unknown extension" in str(caught.value)) == bool(fill)


def test_no_argument_and_an_empty_one_are_usage_errors() -> None:
    for arguments in ([], [""]):
        with pytest.raises(UsageError):
            find_inputs(arguments)


def test_slide_given_twice_is_taken_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path / "a" / "x.svs")
    (tmp_path / "link.svs").symlink_to(tmp_path / "a" / "x.svs")
    (tmp_path / "again").symlink_to(tmp_path / "a")
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    inputs = find_inputs(["a/x.svs", "./a/../a/x.svs", str(tmp_path)])
    assert [str(slide.path) for slide in inputs.slides] == ["a/x.svs"]
    assert reasons(inputs)["link.svs"] == "link to a/x.svs"
    assert reasons(inputs)["again"] == "folder searched already, through a link"
    assert reasons(inputs)["loop"] == "folder searched already, through a link"


def test_slide_is_taken_where_it_is_and_its_links_are_listed(tmp_path: Path) -> None:
    touch(tmp_path / "z" / "x.svs", tmp_path / "m" / "y.svs")
    (tmp_path / "a.svs").symlink_to(tmp_path / "z" / "x.svs")
    (tmp_path / "b").symlink_to(tmp_path / "z")
    (tmp_path / "m" / "back").symlink_to(tmp_path / "z")
    inputs = find_inputs([tmp_path])
    assert sorted(names(inputs)) == ["m/y.svs", "z/x.svs"]
    assert {slide.path for slide in inputs.slides} == {
        tmp_path / "z" / "x.svs",
        tmp_path / "m" / "y.svs",
    }
    searched = "folder searched already, through a link"
    assert reasons(inputs) == {
        "a.svs": f"link to {tmp_path}/z/x.svs",
        "b": searched,
        "back": searched,
    }


def test_links_to_one_slide_elsewhere_are_not_called_links_to_each_other(tmp_path: Path) -> None:
    touch(tmp_path / "store" / "x.svs")
    (tmp_path / "links").mkdir()
    for name in ("a.svs", "b.svs"):
        (tmp_path / "links" / name).symlink_to(tmp_path / "store" / "x.svs")
    inputs = find_inputs([tmp_path / "links"])
    assert names(inputs) == ["a.svs"]
    assert reasons(inputs) == {"b.svs": f"same file as {tmp_path}/links/a.svs"}


def test_link_to_a_slide_elsewhere_is_a_slide_under_its_own_name(tmp_path: Path) -> None:
    touch(tmp_path / "archive" / "x.svs", tmp_path / "archive" / "more" / "y.svs")
    (tmp_path / "cohort").mkdir()
    (tmp_path / "cohort" / "case 1.svs").symlink_to(tmp_path / "archive" / "x.svs")
    (tmp_path / "cohort" / "more").symlink_to(tmp_path / "archive" / "more")
    assert names(find_inputs([tmp_path / "cohort"])) == ["case 1.svs", "more/y.svs"]


def test_folder_whose_slides_were_all_given_before_is_no_error(tmp_path: Path) -> None:
    touch(tmp_path / "x.svs")
    assert len(find_inputs([tmp_path / "x.svs", tmp_path]).slides) == 1


def test_two_slides_with_one_result_stop_the_run_with_both_names(tmp_path: Path) -> None:
    touch(tmp_path / "a" / "x.svs", tmp_path / "b" / "x.svs", tmp_path / "b" / "x.tif")
    with pytest.raises(UsageError) as caught:
        find_inputs([tmp_path / "a" / "x.svs", tmp_path / "b" / "x.svs"])
    assert str(tmp_path / "a" / "x.svs") in str(caught.value)
    assert str(tmp_path / "b" / "x.svs") in str(caught.value)
    with pytest.raises(UsageError, match=r"x\.svs and .*x\.tif would both be written to b/x\.h5"):
        find_inputs([tmp_path])


def test_advice_about_two_slides_with_one_result_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    touch(Path("d/x.svs"), Path("d/x.tif"), Path("d/y.svs"), Path("d/y.tif"), Path("e/x.svs"))
    with pytest.raises(UsageError, match=r"\(and 1 more such\).*give only 'd/\*\.svs'"):
        find_inputs(["d"])
    assert results(find_inputs(["d/*.svs"])) == ["out/lite0/x.h5", "out/lite0/y.h5"]
    with pytest.raises(UsageError, match="give the folder above both"):
        find_inputs(["d/x.svs", "e/x.svs"])
    Path("list.csv").write_text("slide,relative_path\nd/x.svs,x svs.svs\nd/x.tif,x tif.tif\n")
    assert results(find_inputs(["list.csv"])) == ["out/lite0/x svs.h5", "out/lite0/x tif.h5"]


def test_same_stem_in_two_folders_does_not_collide(tmp_path: Path) -> None:
    touch(tmp_path / "a" / "x.svs", tmp_path / "b" / "x.svs")
    assert results(find_inputs([tmp_path])) == ["out/lite0/a/x.h5", "out/lite0/b/x.h5"]


def test_glob_keeps_the_folders_below_its_fixed_part(tmp_path: Path) -> None:
    touch(*(tmp_path / p for p in ("a/x.svs", "b/x.svs", "b/c/y.svs", "b/x.txt", "b/x.png")))
    assert names(find_inputs([f"{tmp_path}/*/x.*"])) == ["a/x.svs", "b/x.svs"]
    assert names(find_inputs([f"{tmp_path}/**/*.svs"])) == ["a/x.svs", "b/c/y.svs", "b/x.svs"]
    assert names(find_inputs([f"{tmp_path}/b*"])) == ["b/x.svs", "b/c/y.svs"]
    assert names(find_inputs([f"{tmp_path}/b/*.png"])) == ["x.png"]
    with pytest.raises(UsageError, match="no slide matches this pattern"):
        find_inputs([f"{tmp_path}/*.ndpi"])


def test_file_with_a_wildcard_in_its_name_is_taken_as_named(tmp_path: Path) -> None:
    touch(tmp_path / "a[1].svs", tmp_path / "a1.svs")
    assert names(find_inputs([tmp_path / "a[1].svs"])) == ["a[1].svs"]


def test_csv_gives_each_slide_its_own_values_and_carries_the_rest(tmp_path: Path) -> None:
    touch(tmp_path / "in" / "a" / "x.svs", tmp_path / "far" / "y.svs")
    table = tmp_path / "in" / "list.csv"
    table.write_text(
        "\ufeffSlide,MPP,mask,bulk_rna,patient\n"
        "a/x.svs,0.2527,m/x.png,rna/x.csv,P1\n"
        "\n"
        f'"{tmp_path}/far/y.svs",,,,"P2, late"\n'
        "../far/gone.svs,,,,P3\n",
        encoding="utf-8",
    )
    first, second, third = find_inputs([table]).slides
    assert first == SlideInput(
        path=table.parent / "a" / "x.svs",
        relative=PurePath("a/x.svs"),
        mpp=0.2527,
        mask=table.parent / "m" / "x.png",
        bulk_rna=table.parent / "rna" / "x.csv",
        extra={"patient": "P1"},
    )
    assert (second.relative, second.mpp, second.mask) == (PurePath("y.svs"), None, None)
    assert second.extra == {"patient": "P2, late"}
    assert third.problem is not None
    assert third.relative == PurePath("gone.svs")


def test_remarks_blank_lines_and_white_space_in_a_list_are_no_slides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    touch(Path("a.svs"), Path("#b.svs"))
    plain = "# cohort 7, without controls\n\n  a.svs\t\n   # late\n./#b.svs\n"
    assert names(find_inputs(["-"], stdin=io.StringIO(plain))) == ["a.svs", "#b.svs"]
    Path("list.csv").write_text("# cohort, 7\n\nslide,mpp\n a.svs , 0.5 \n#b.svs,0.25\n")
    slides = find_inputs(["list.csv"]).slides
    assert [(slide.relative.name, slide.mpp) for slide in slides] == [
        ("a.svs", 0.5),
        ("#b.svs", 0.25),
    ]


def test_csv_with_semicolons_as_spreadsheets_write_it(tmp_path: Path) -> None:
    touch(tmp_path / "x.svs")
    (tmp_path / "l.csv").write_text("slide;mpp;note\nx.svs;0.5;a,b\n")
    (slide,) = find_inputs([tmp_path / "l.csv"]).slides
    assert (slide.mpp, slide.extra) == (0.5, {"note": "a,b"})


@pytest.mark.parametrize("delimiter", [";", "\t"])
def test_csv_of_a_spreadsheet_with_decimal_commas(tmp_path: Path, delimiter: str) -> None:
    touch(tmp_path / "x,1.svs")
    lines = (
        f"sep={delimiter}",
        f"slide{delimiter}mpp{delimiter}age",
        f"x,1.svs{delimiter}0,499{delimiter}63,5",
    )
    (tmp_path / "l.csv").write_text("\ufeff" + "\r\n".join(lines) + "\r\n", encoding="utf-8")
    (slide,) = find_inputs([tmp_path / "l.csv"]).slides
    assert (slide.path.name, slide.mpp, slide.extra) == ("x,1.svs", 0.499, {"age": "63,5"})


def test_list_taken_for_a_slide_and_a_pattern_in_a_list_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    touch(Path("x.svs"))
    Path("list.TSV").write_text("slide\tmpp\nx.svs\t0.5\n")
    (slide,) = find_inputs(["list.TSV"]).slides
    assert slide.problem is not None
    assert "ends in .csv, or is read with -" in slide.problem
    with Path("list.TSV").open() as text:
        assert names(find_inputs(["-"], stdin=text)) == ["x.svs"]
    (slide,) = find_inputs(["-"], stdin=io.StringIO("*.svs\n")).slides
    assert slide.problem is not None
    assert "patterns in a list are not searched for" in slide.problem


def test_name_without_room_for_its_result_is_told_before_the_slide_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fits, long = Path("a" * 209 + ".svs"), Path("b" * 210 + ".svs")
    touch(fits, long)
    claim = tmp_path / f"{fits.stem}.h5.claim.{'0' * 32}.now"
    claim.touch()  # the longest name that a run makes can be made
    one, other = find_inputs(["."]).slides
    assert one.problem is None
    assert other.problem is not None
    assert "its result's name would take 213 bytes" in other.problem
    Path("l.csv").write_text(f"slide,relative_path\n{long},b.svs\n")
    (slide,) = find_inputs(["l.csv"]).slides
    assert slide.problem is None
    assert [s.problem for s in find_inputs(["."], for_results=False).slides] == [None, None]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("path,mpp\nx.svs,1\n", "no column 'slide'.*found: path, mpp"),
        ("slide\n", "no slides in this list"),
        ("", "no slides in this list"),
        ("# a.svs\n\n", "no slides in this list"),
        ("slide,mpp\nx.svs,abc\n", "line 2: mpp 'abc' is not a number of µm per pixel"),
        ("slide,mpp\n\nx.svs,0\n", "line 3: mpp '0'"),
        ("slide,mpp\nx.svs,nan\n", "mpp 'nan'"),
        ("slide,mpp\n,0.5\n", "line 2: no slide"),
        ('slide\n"x.svs\n' + "y" * 140_000, "l.csv, line 2: field larger.*a quote not closed"),
        ('slide,mpp\nx.svs,1\n"y.svs,1\nz.svs,1\n', "l.csv, line 3: .*a quote not closed"),
        ('slide,mpp\n"x.svs,1\ny.svs,1\n"z.svs",1\n', "l.csv, line 2: .*a quote not closed"),
        ("slide,mpp\nx.svs,0.5,0.7\n", "3 cells for 2 columns"),
        ("slide,mpp,mpp\nx.svs,1,1\n", "column 'mpp' is there twice"),
        ("slide,relative_path\nx.svs,../x\n", "leaves the output folder"),
        ("slide,mpp\nx.svs,0.5\nx.svs,0.25\n", "given twice with different mpp"),
    ],
)
def test_malformed_list_stops_the_run_and_says_where(
    tmp_path: Path, text: str, message: str
) -> None:
    touch(tmp_path / "x.svs")
    (tmp_path / "l.csv").write_text(text)
    with pytest.raises(UsageError, match=message) as caught:
        find_inputs([tmp_path / "l.csv"])
    assert "x.svs" in str(caught.value) or "l.csv" in str(caught.value)


def test_column_called_almost_as_one_that_means_something_is_told(tmp_path: Path) -> None:
    touch(tmp_path / "x.svs")
    columns = "slide,mppp,Masks,slide_id,task,relative_path,relative-path,bulk_rna2,"
    (tmp_path / "l.csv").write_text(f"{columns}\nx.svs\n")
    found = find_inputs([tmp_path / "l.csv"])
    told = [re.findall("'(.*?)'", note) for note in found.notes]
    assert told == [["mppp", "mpp"], ["masks", "mask"], ["bulk_rna2", "bulk_rna"]]
    assert all(note.startswith(f"{tmp_path}/l.csv: the column ") for note in found.notes)


def test_list_that_is_missing_or_not_text_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "utf16.csv").write_bytes("slide\nx.svs\n".encode("utf-16"))
    for name in ("utf16.csv", "gone.csv"):
        with pytest.raises(UsageError, match=name):
            find_inputs([tmp_path / name])


def test_standard_input_is_plain_paths_or_a_csv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touch(tmp_path / "a" / "x, 1.svs", tmp_path / "folder" / "y.svs")
    monkeypatch.chdir(tmp_path)
    plain = find_inputs(["-"], stdin=io.StringIO("a/x, 1.svs\n\nfolder\n"))
    assert names(plain) == ["a/x, 1.svs", "y.svs"]
    table = find_inputs(["-"], stdin=io.StringIO('slide,mpp\n"a/x, 1.svs",0.5\n'))
    assert [(s.path, s.mpp) for s in table.slides] == [(Path("a/x, 1.svs"), 0.5)]
    with pytest.raises(UsageError, match="standard input: no slides"):
        find_inputs(["-"], stdin=io.StringIO(""))


def test_row_of_a_folder_of_many_slides_can_hold_no_values(tmp_path: Path) -> None:
    touch(tmp_path / "f" / "x.svs", tmp_path / "f" / "y.svs")
    (tmp_path / "l.csv").write_text("slide,mpp\nf,0.5\n")
    with pytest.raises(UsageError, match="folder of 2 slides"):
        find_inputs([tmp_path / "l.csv"])


def test_frozen_list_reads_back_to_the_same_slides_and_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touch(tmp_path / "in" / "a" / "x y.svs", tmp_path / "in" / "b" / "x y.svs")
    (tmp_path / "in" / "l.csv").write_text(
        'slide,mpp,mask,bulk_rna,note\na/x y.svs,0.2527,m.png,r.csv,"1, ""2"""\nb/x y.svs,,,,\n'
    )
    monkeypatch.chdir(tmp_path)
    inputs = find_inputs([Path("in/l.csv")])
    (tmp_path / "elsewhere").mkdir()
    write_list(tmp_path / "elsewhere" / "frozen.csv", inputs.slides)
    monkeypatch.chdir("/")
    again = find_inputs([tmp_path / "elsewhere" / "frozen.csv"])
    assert results(again) == results(inputs) == ["out/lite0/a/x y.h5", "out/lite0/b/x y.h5"]
    first, second = again.slides
    assert first.path == tmp_path / "in" / "a" / "x y.svs"
    assert (first.mpp, first.mask) == (0.2527, tmp_path / "in" / "m.png")
    assert first.bulk_rna == tmp_path / "in" / "r.csv"
    assert first.extra == {"note": '1, "2"'}
    assert (second.mpp, second.mask, second.extra) == (None, None, {})
    assert [s.size_bytes for s in again.slides] == [1, 1]


def test_output_folder_is_neither_searched_nor_listed(tmp_path: Path) -> None:
    touch(tmp_path / "x.svs", tmp_path / "embeddings" / "lite0" / "x.h5")
    inputs = find_inputs([tmp_path], exclude=[tmp_path / "embeddings"])
    assert (names(inputs), inputs.skipped, inputs.notes) == (["x.svs"], (), ())
    with pytest.raises(UsageError, match="results go to this very folder, so it is not searched"):
        find_inputs([tmp_path], exclude=[tmp_path / "embeddings" / ".."])


def test_slides_in_the_output_folder_are_told_in_one_note(tmp_path: Path) -> None:
    out = tmp_path / "embeddings"
    touch(tmp_path / "x.svs", out / "lite0" / "x.h5", out / "a" / "b.SVS", out / "a" / "c.tiff")
    note = (
        f"{out}: results go here, so it is not searched, and holds 2 slides that no result is "
        f"made of, such as {out}/a/b.SVS; move them out of it or name them"
    )
    # However often it is met.
    found = find_inputs([tmp_path, tmp_path / "em*" / "..", tmp_path], exclude=[out])
    assert (names(found), found.notes) == (["x.svs"], (note,))
    named = [out / "a" / "b.SVS", out / "a" / "c.tiff"]
    found = find_inputs([tmp_path, *named], exclude=[out])
    assert (names(found), found.notes) == (["x.svs", "b.SVS", "c.tiff"], ())
    (tmp_path / "x.svs").unlink()
    with pytest.raises(UsageError, match=f"no slides in this folder; {re.escape(note)}"):
        find_inputs([tmp_path], exclude=[out])


def test_unlistable_folder_below_is_a_failing_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touch(tmp_path / "x.svs", tmp_path / "locked" / "y.svs")
    scandir = os.scandir

    def refuse(path: Path) -> "os._ScandirIterator[str]":
        if Path(path).name == "locked":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(str(path))

    # Root may list anything, so the refusal is made here.
    monkeypatch.setattr(os, "scandir", refuse)
    good, bad = find_inputs([tmp_path]).slides
    assert good.problem is None
    assert bad.path.name == "locked"
    assert bad.problem == "this folder cannot be listed: Permission denied"
    with pytest.raises(UsageError, match="cannot be listed"):
        find_inputs([tmp_path / "locked"])


def test_mirax_slide_counts_once_with_its_folder_as_companion(tmp_path: Path) -> None:
    touch(
        tmp_path / "m.mrxs",
        tmp_path / "m" / "Slidedat.ini",
        tmp_path / "m" / "Data0000.dat",
        tmp_path / "alone" / "Slidedat.ini",
        tmp_path / "alone" / "Data0000.dat",
        tmp_path / "n.mrxs",
        tmp_path / "n" / "other.svs",
    )
    inputs = find_inputs([tmp_path])
    assert names(inputs) == ["m.mrxs", "n.mrxs", "n/other.svs"]
    assert [p.name for p in inputs.slides[0].files()] == ["m.mrxs", "Data0000.dat", "Slidedat.ini"]
    assert inputs.slides[0].size() == 3
    assert reasons(inputs) == {
        "m": "companion: data of the .mrxs file beside it",
        "alone": "MIRAX data without the .mrxs file beside it",
    }


def test_hamamatsu_index_names_its_companions(tmp_path: Path) -> None:
    touch(tmp_path / "s.jpg", tmp_path / "s(1,0).jpg", tmp_path / "s.opt", tmp_path / "other.jpg")
    (tmp_path / "s.vms").write_text(
        "[Virtual Microscope Specimen]\nImageFile=s.jpg\nImageFile(1,0)=s(1,0).jpg\n"
        "MapFile=gone.jpg\nOptimisationFile=s.opt\nMacroImage=../other.jpg\n"
    )
    assert [p.name for p in companions(tmp_path / "s.vms")] == ["s(1,0).jpg", "s.jpg", "s.opt"]


@pytest.mark.parametrize("implicit", [False, True])
@pytest.mark.parametrize("padding", [0, 40_000])
def test_dicom_series_counts_once_however_it_is_given(
    tmp_path: Path, implicit: bool, padding: int
) -> None:
    for name, series in (("b.dcm", "1.5"), ("a.dcm", "1.5"), ("IM0001", "1.6"), ("1.2.3", "1.5")):
        dicom_file(
            tmp_path / "d" / name,
            series=series,
            implicit=implicit,
            padding=0 if implicit else padding,
        )
    touch(tmp_path / "d" / "README", tmp_path / "d" / "damaged.dcm")
    inputs = find_inputs([tmp_path])
    assert names(inputs) == ["d/1.2.3", "d/IM0001", "d/damaged.dcm"]
    assert [p.name for p in inputs.slides[0].files()] == ["1.2.3", "a.dcm", "b.dcm"]
    assert reasons(inputs)["README"] == "unknown extension"
    assert reasons(inputs)["a.dcm"] == "companion: same DICOM series as 1.2.3"
    named = find_inputs([tmp_path / "d" / "b.dcm", tmp_path / "d" / "a.dcm"])
    assert names(named) == ["1.2.3"]
    alone = SlideInput(path=tmp_path / "d" / "a.dcm", relative=PurePath("a.dcm"))
    assert [p.name for p in alone.files()] == ["a.dcm", "1.2.3", "b.dcm"]


def test_dicom_series_with_a_folder_to_itself_is_named_after_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for case, series in (("case 1", "1.5"), ("case 2.x", "1.6")):
        for name in ("1.2.840.1", "1.2.840.2"):
            dicom_file(tmp_path / "cohort" / case / f"{name}.dcm", series=series)
    expected = ["out/lite0/case 1.h5", "out/lite0/case 2.x.h5"]
    Path("list.csv").write_text("slide\ncohort/case 1\ncohort/case 2.x/1.2.840.2.dcm\n")
    assert results(find_inputs(["cohort"])) == expected
    assert results(find_inputs(["cohort/case 1", "cohort/case 2.x"])) == expected
    assert results(find_inputs(["cohort/case 1/1.2.840.2.dcm"])) == expected[:1]
    monkeypatch.chdir("cohort/case 1")
    assert results(find_inputs(["."])) == expected[:1]
    monkeypatch.chdir(tmp_path)
    write_list(Path("frozen.csv"), find_inputs(["cohort"]).slides)
    assert results(find_inputs(["frozen.csv"])) == expected


def test_dicom_series_that_share_a_folder_or_are_one_file_keep_their_files_names(
    tmp_path: Path,
) -> None:
    for name, series in (("1", "1.5"), ("2", "1.5"), ("3", "1.6"), ("4", "1.6")):
        dicom_file(tmp_path / "two" / f"{name}.dcm", series=series)
    dicom_file(tmp_path / "one" / "slide.dcm", series="1.7")
    assert names(find_inputs([tmp_path])) == ["one/slide.dcm", "two/1.dcm", "two/3.dcm"]


def test_dicom_series_and_a_slide_of_its_folders_name_stop_the_run(tmp_path: Path) -> None:
    for name in ("1", "2"):
        dicom_file(tmp_path / "x" / f"{name}.dcm", series="1.5")
    touch(tmp_path / "x.svs")
    with pytest.raises(UsageError, match=r"would both be written to x\.h5; rename one"):
        find_inputs([tmp_path])


def test_dicom_of_another_modality_is_skipped_with_its_name(tmp_path: Path) -> None:
    dicom_file(tmp_path / "s.dcm", series="1.5")
    dicom_file(tmp_path / "ct.dcm", series="1.6", modality="CT")
    inputs = find_inputs([tmp_path])
    assert names(inputs) == ["s.dcm"]
    assert reasons(inputs) == {"ct.dcm": "DICOM of modality CT, not SM (slide microscopy)"}


def test_dicom_nested_without_end_is_a_damaged_slide(tmp_path: Path) -> None:
    dicom_file(tmp_path / "s.dcm", series="1.5")
    sequence = struct.pack("<HH", 8, 0x1115) + b"SQ\0\0" + b"\xff" * 4
    item = struct.pack("<HHI", 0xFFFE, 0xE000, 0xFFFFFFFF)
    (tmp_path / "deep.dcm").write_bytes(b"\0" * 128 + b"DICM" + (sequence + item) * 100_000)
    assert names(find_inputs([tmp_path])) == ["deep.dcm", "s.dcm"]


def test_real_slides_of_several_files_count_once(shared_slides: Path, tmp_path: Path) -> None:
    for folder in ("dicom", "mirax-broken", "ome-tiff"):
        shutil.copytree(shared_slides / folder, tmp_path / folder)
    inputs = find_inputs([tmp_path])
    assert len(inputs.slides) == 7
    sizes = {slide.relative.as_posix(): slide.size() for slide in inputs.slides}
    assert sizes["dicom/CMU-1-Small-Region"] == 46836 + 1250776 + 120966 + 68422
    assert sizes["dicom/boxes"] == 5502 + 5658
