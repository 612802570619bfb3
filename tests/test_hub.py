"""Weights come from the hub only when asked for, whole, and with their licence accepted."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bioptimus.models.facts import FACTS
from bioptimus.runtime.archive import file_sha256, inspect_archive
from bioptimus.runtime.hub import download, list_files
from bioptimus.runtime.vit import random_vit
from cli.main import main
from tests.conftest import ROOT
from tests.small_hub import REVISION, Fault, SmallHub, small_hub
from tests.test_vit import hub_folder

constants = pytest.importorskip("huggingface_hub.constants", reason="needs the extra 'export'")
Captured = pytest.CaptureFixture[str]
FACT = FACTS["kaiko-s16"]
COMMAND = ["models", "export", "kaiko-s16", "--from-hub"]
NEEDED = ["config.json", "model.safetensors"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallHub]:
    assert FACT.vit is not None
    shape = replace(FACT.vit, depth=1)
    weights = random_vit(shape, depth=1).state_dict()
    folder = hub_folder(tmp_path_factory.mktemp("hub") / "files", shape, weights)
    (folder / "README.md").write_text("not needed")
    (folder / "pytorch_model.bin").write_bytes(b"not needed beside the other")
    with small_hub(FACT.repository, folder, "kaiko-terms") as hub:
        yield hub


@pytest.fixture
def hub(served: SmallHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SmallHub:
    served.fetched.clear()
    served.fault = ""
    monkeypatch.chdir(tmp_path)
    use_hub(served.url, monkeypatch)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return served


def use_hub(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What HF_ENDPOINT sets in a process that starts."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace("https://huggingface.co", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def files_below(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_what_would_be_fetched_is_said_and_nothing_is(
    hub: SmallHub, tmp_path: Path, capsys: Captured
) -> None:
    assert main(COMMAND) == 2
    (said,) = capsys.readouterr().err.splitlines()
    size = (hub.folder / "model.safetensors").stat().st_size
    for words in (f"model.safetensors ({size / 1e6:.1f} MB)", "config.json (", FACT.repository,
                  FACT.licence, "its page says kaiko-terms", "--accept-licence"):  # fmt: skip
        assert words in said
    assert hub.fetched == []
    assert files_below(tmp_path) == []


def test_accepted_weights_are_fetched_and_say_where_they_are_from(
    served: SmallHub, tmp_path: Path
) -> None:
    served.fetched.clear()
    served.fault = ""
    done = subprocess.run(
        [sys.executable, "-m", "cli", *COMMAND, "--accept-licence", "-o", "k.pt2"],
        cwd=tmp_path,
        env=os.environ | {"HF_ENDPOINT": served.url, "HF_HOME": str(tmp_path / "hf"),
                          "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("downloading config.json")
    assert FACT.licence in done.stderr
    assert sorted(served.fetched) == NEEDED
    spec = inspect_archive(tmp_path / "k.pt2").spec
    assert spec is not None
    assert spec.source == f"{FACT.repository}@{REVISION}"
    assert spec.source_sha256 == file_sha256(served.folder / "model.safetensors")
    assert spec.licence == FACT.licence


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("gated", "config.json: closed to you; ask for access at http"),
        ("missing", "not found at http"),
        ("cut short", "model.safetensors: cannot be downloaded from http"),
        ("altered", "model.safetensors arrived damaged"),
        ("failing", "config.json: cannot be downloaded from http"),
    ],
)
def test_a_download_that_fails_is_one_line_and_leaves_no_half_file(
    hub: SmallHub, fault: Fault, words: str, tmp_path: Path, capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    # The client waits before each of its tries.
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    hub.fault = fault
    assert main([*COMMAND, "--accept-licence"]) == 1
    said = capsys.readouterr().err.splitlines()
    assert words in said[-1]
    assert said[-1].startswith(f"error: {FACT.repository}: ")
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    content = {path.read_bytes() for path in left if path.suffix not in (".lock", ".TAG")}
    assert content <= {(hub.folder / "config.json").read_bytes()}
    hub.fault = ""
    assert files_below(download(list_files(FACT.repository))) == NEEDED


def test_a_hub_out_of_reach_is_named_and_the_licence_still_told(
    hub: SmallHub, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The discard port, where nobody listens.
    use_hub("http://127.0.0.1:9", monkeypatch)
    assert main([*COMMAND, "--accept-licence"]) == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert "cannot be downloaded from http://127.0.0.1:9: " in said
    assert "refused" in said
    assert main(COMMAND) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert FACT.licence in said
    assert "refused" in said


def test_a_repository_without_weights_is_refused(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    with small_hub(FACT.repository, tmp_path) as hub:
        use_hub(hub.url, monkeypatch)
        assert main([*COMMAND, "--accept-licence"]) == 1
    assert "holds neither model.safetensors nor" in capsys.readouterr().err


def test_parts_and_pickles_are_chosen_only_where_there_is_nothing_better(tmp_path: Path) -> None:
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
             "model.safetensors.index.json", "pytorch_model.bin", "slide_encoder.pth"]  # fmt: skip
    for name in names:
        (tmp_path / name).write_bytes(b"12345")
    with pytest.MonkeyPatch.context() as patch, small_hub(FACT.repository, tmp_path) as hub:
        use_hub(hub.url, patch)
        assert [file.name for file in list_files(FACT.repository).files] == names[:3]
        for name in names[:3]:
            (tmp_path / name).unlink()
        assert str(list_files(FACT.repository)) == "pytorch_model.bin (5 bytes)"
