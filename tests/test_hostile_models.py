"""Whatever stands in a .pt2: it is understood, or refused in one line, before anything runs."""

import json
import re
import stat
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bioptimus.errors import BioptimusError, UsageError
from bioptimus.models.types import ModelSpec
from bioptimus.runtime.loader import resolve_model
from bioptimus.runtime.sources import export_source
from cli.main import main
from tests.tiny_models import TINY, save_tiny

DESCRIPTION, PROGRAM = "archive/extra/bioptimus.json", "archive/models/model.json"
Members = dict[str, bytes]
Change = Callable[[zipfile.ZipFile, Members], None]


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Members:
    """What a good file holds."""
    path = save_tiny(tmp_path_factory.mktemp("good") / "tiny.pt2")
    with zipfile.ZipFile(path) as file:
        return {name: file.read(name) for name in file.namelist()}


def write(path: Path, members: Members, change: Change | None = None) -> Path:
    """A ``.pt2`` of these members, and of what ``change`` adds to them."""
    with zipfile.ZipFile(path, "w") as file:
        for name, content in members.items():
            file.writestr(name, content)
        if change is not None:
            change(file, members)
    return path


def twice(file: zipfile.ZipFile, members: Members) -> None:
    with pytest.warns(UserWarning, match="Duplicate name"):
        file.writestr(DESCRIPTION, members[DESCRIPTION])


def twice_but_for_capitals(file: zipfile.ZipFile, members: Members) -> None:
    file.writestr(PROGRAM.upper(), members[PROGRAM])


def link(file: zipfile.ZipFile, _: Members) -> None:
    entry = zipfile.ZipInfo("archive/extra/more.json")
    entry.external_attr = (stat.S_IFLNK | 0o777) << 16
    file.writestr(entry, "/etc/passwd")


def bomb(file: zipfile.ZipFile, _: Members) -> None:
    file.writestr("archive/extra/more.json", bytes(80 << 20), compress_type=zipfile.ZIP_DEFLATED)


def unusually_compressed(file: zipfile.ZipFile, _: Members) -> None:
    file.writestr("archive/extra/more.json", "x" * 99, compress_type=zipfile.ZIP_LZMA)


def steering_the_terminal(file: zipfile.ZipFile, _: Members) -> None:
    file.writestr("archive/extra/\x1b[2J.json", "{}")


DESCRIPTIONS: list[tuple[dict[str, Any] | bytes, str]] = [
    ({"name": "a/../b"}, "no slashes"),
    ({"name": ".."}, "not begin with a dot"),
    ({"name": "a\nb"}, "control characters"),
    ({"name": " "}, "not empty"),
    ({"name": "n" * 300}, "at most 100"),
    ({"name": 3}, "must be a text"),
    ({"mean": [float("nan")] * 3}, "mean .*must be numbers"),
    ({"std": [0.5, 0.0, 0.5]}, "std .*must be positive"),
    ({"mean": "0.5"}, "must be a list"),
    ({"channels": 4}, "must have 4 values"),
    ({"tile": {"size_px": 0, "mpp": 0.5}}, "must be at least 1"),
    ({"tile": {"size_px": 10**9, "mpp": 0.5}}, "tile size 1000000000"),
    ({"tile": {"size_px": 8.5, "mpp": 0.5}}, "tile: size px 8.5"),
    ({"tile": {"size_px": 8, "mpp": -1}}, "tile mpp -1"),
    ({"tile": {"size_px": 8, "mpp": 1e9}}, "tile mpp"),
    ({"tile": "large"}, "cannot be read"),
    ({"embedding_dim": 10**12}, "embedding_dim 1000000000000"),
    ({"embedding_dim": "5"}, "must be a whole number"),
    ({"output_kind": "code"}, "output_kind .*known are"),
    ({"pooling": ["cls"]}, "must be a text"),
    ({"licence": "\x1b[2Jfree"}, "without control characters"),
    ({"description": "\ud800"}, "without control characters"),
    ({"output_names": [1]}, "must be texts"),
    (b"[" * 100_000, "cannot be read"),
    (b"[]", "cannot be read"),
    (b'{"name": ', "cannot be read"),
]


@pytest.mark.parametrize(("values", "words"), DESCRIPTIONS, ids=[w for _, w in DESCRIPTIONS])
def test_a_description_that_makes_no_sense_is_refused_in_one_line(
    values: dict[str, Any] | bytes,
    words: str,
    members: Members,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    example_slide: Path,
) -> None:
    if isinstance(values, dict):
        values = json.dumps(json.loads(members[DESCRIPTION]) | values).encode()
    path = write(tmp_path / "model.pt2", members | {DESCRIPTION: values})
    refused(path, words, capsys, example_slide)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (twice, "two members have the same name"),
        (twice_but_for_capitals, "two members have the same name"),
        (link, "members are links"),
        (bomb, "claim to unpack to"),
        (unusually_compressed, "compressed in an unusual way"),
        (steering_the_terminal, "control characters in their names"),
    ],
)
def test_an_archive_with_what_no_exporter_writes_is_refused_in_one_line(
    change: Change,
    words: str,
    members: Members,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    example_slide: Path,
) -> None:
    refused(write(tmp_path / "model.pt2", members, change), words, capsys, example_slide)


def refused(
    path: Path, words: str, capsys: pytest.CaptureFixture[str], example_slide: Path
) -> None:
    out = path.parent / "out"
    for arguments in (
        ["models", "show", str(path)],
        ["embed", str(example_slide), "--model", str(path), "--out", str(out)],
    ):
        assert main(arguments) == 1
        said = capsys.readouterr()
        (line,) = said.err.splitlines()
        assert line.startswith(f"error: {path}: ")
        assert line.isprintable()
        assert re.search(words, line), line
    assert sorted(path.parent.rglob("*.h5")) == []


@pytest.mark.parametrize(
    ("member", "words"),
    [
        ("archive/data/weights/weight_0", "weight_0"),
        ("archive/data/sample_inputs/model.pt", "model.pt"),
        ("archive/archive_version", "archive_version"),
    ],
)
def test_what_torch_only_logs_is_the_reason_given(
    member: str, words: str, members: Members, tmp_path: Path, example_slide: Path
) -> None:
    path = write(tmp_path / "model.pt2", {k: v for k, v in members.items() if k != member})
    done = subprocess.run(
        [sys.executable, "-m", "cli", "embed", example_slide, "--model", path],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    *before, line = done.stderr.splitlines()
    assert before == ["1 slide", "loading tiny"]
    assert line.startswith(f"error: {path}: torch cannot load it: ")
    assert words in line


def places(value: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON document."""
    yield here
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*here, key))
    elif isinstance(value, list):
        for number, inner in enumerate(value[:3]):
            yield from places(inner, (*here, number))


def with_value(document: bytes, place: tuple[Any, ...], value: object) -> bytes:
    root = [json.loads(document)]
    inner: Any = root
    for key in (0, *place)[:-1]:
        inner = inner[key]
    inner[(0, *place)[-1]] = value
    return json.dumps(root[0]).encode()


def refusal(path: Path) -> str:
    try:
        spec = resolve_model(path).spec
    except BioptimusError as exc:
        return str(exc)
    assert spec.tile.size_px == TINY.tile.size_px
    return ""


ODD: tuple[object, ...] = (
    None,
    -1,
    10**12,
    10**400,
    float("inf"),
    "",
    "\x1b[2J",
    [],
    [[]],
    {"a": 1},
    True,
)


@pytest.mark.parametrize(("member", "each"), [(DESCRIPTION, 11), (PROGRAM, 1)])
def test_any_value_in_any_place_is_understood_or_refused(
    member: str, each: int, members: Members, tmp_path: Path
) -> None:
    refusals = 0
    for number, place in enumerate(places(json.loads(members[member]))):
        for odd in range(each):
            value = ODD[(number + odd) % len(ODD)]
            path = write(
                tmp_path / "odd.pt2",
                members | {member: with_value(members[member], place, value)},
            )
            said = refusal(path)
            refusals += bool(said)
            assert said.isprintable(), place
            assert not said or str(path) in said, place
    assert refusals > 20


def test_a_program_that_would_fill_the_memory_with_one_batch_is_refused(
    members: Members, tmp_path: Path
) -> None:
    batch = ("graph_module", "graph", "tensor_values", "tiles", "sizes", 0)
    for count, words in ((4096, ""), (4097, "batches of 4097")):
        program = with_value(members[PROGRAM], batch, {"as_int": count})
        said = refusal(write(tmp_path / "m.pt2", members | {PROGRAM: program}))
        assert words in said
        assert bool(said) == bool(words)


@pytest.mark.parametrize(
    "name", ["a/../b", "..", "", "a\\b", ".hidden", "tab\there", "c:d", "runs", "Runs"]
)
def test_a_name_that_no_folder_can_have_is_refused_at_export(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="model name"):
        export_source(
            str(tmp_path), None, facts_key="h0", overrides={"name": name}, device="cpu",
            slide=None, hub=False, accept_licence=False,
        )  # fmt: skip
    assert ModelSpec(name="UNI2-h, v1.0 (ViT_h)").name


def with_bytes(path: Path, record: bytes, field: int, value: bytes) -> Path:
    """Change a field of the archive's last record of that kind."""
    content = bytearray(path.read_bytes())
    start = content.rindex(record) + field
    content[start : start + len(value)] = value
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("field", [12, 16], ids=["length", "offset"])
def test_a_directory_that_points_astray_is_a_damaged_archive(
    field: int, members: Members, tmp_path: Path
) -> None:
    path = with_bytes(write(tmp_path / "m.pt2", members), b"PK\x05\x06", field, b"\xff" * 4)
    assert re.search("damaged|truncated", refusal(path))


def test_an_archive_on_several_disks_is_damaged(tmp_path: Path) -> None:
    # In the record of large archives, as torch writes it whatever the size.
    path = with_bytes(save_tiny(tmp_path / "m.pt2"), b"PK\x06\x07", 16, b"\x02\x00")
    assert "damaged" in refusal(path)
