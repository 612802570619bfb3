"""A name or a file becomes the model it says it is, or an error that names the next step."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from bioptimus.batch import run as batch_run
from bioptimus.errors import CheckpointError, UsageError
from bioptimus.runtime import archive
from bioptimus.runtime.archive import file_sha256
from bioptimus.runtime.loader import build_server_model, resolve_model, wanted_device
from bioptimus.runtime.segmenter import open_segmenter
from bioptimus.runtime.server_model import BaseServerModel, BulkRNAServerModel, MaskServerModel
from tests.test_runners import Mask
from tests.tiny_models import TINY, TinyRNA, save_foreign, save_module, save_tiny


@pytest.fixture(scope="module")
def portable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("loader") / "tiny.pt2")


def test_a_file_with_a_description_needs_no_name(portable: Path) -> None:
    model = build_server_model(str(portable))
    assert type(model) is BaseServerModel
    assert model.model_spec == TINY
    assert model.checkpoint_path == portable
    assert model.checkpoint_sha256 == file_sha256(portable)


def test_the_class_follows_the_description(tmp_path: Path) -> None:
    mask = TINY.with_(name="mask", output_kind="mask", embedding_dim=0)
    genes = TINY.with_(
        name="genes", output_kind="prediction_and_embedding", prediction_dim=2, rna_dim=7
    )
    save_module(Mask(), mask, tmp_path / "mask.pt2")
    save_module(TinyRNA(), genes, tmp_path / "genes.pt2")
    assert type(build_server_model(tmp_path / "mask.pt2")) is MaskServerModel
    assert type(build_server_model(tmp_path / "genes.pt2")) is BulkRNAServerModel


def test_a_file_without_a_description_needs_a_name(tmp_path: Path) -> None:
    path = save_foreign(tmp_path / "foreign.pt2")
    with pytest.raises(CheckpointError, match=r"carries no description.*--checkpoint"):
        resolve_model(path)
    with pytest.raises(CheckpointError, match=r"takes uint8 .*but h1 takes float32"):
        resolve_model("h1", path)


def test_a_file_of_another_model_than_asked_for_is_refused(portable: Path) -> None:
    with pytest.raises(CheckpointError, match="is tiny, asked for was h1"):
        resolve_model("h1", portable)


def test_weights_that_are_the_users_are_asked_for(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"h1: .*pass --checkpoint PATH\.pt2"):
        resolve_model("h1", assets_root=tmp_path)


def test_checkpoints_are_found_in_the_assets_folder(portable: Path, tmp_path: Path) -> None:
    target = tmp_path / "h1.pt2"
    target.symlink_to(portable)
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/h1\.pt2: is tiny"):
        resolve_model("h1", assets_root=tmp_path)
    assert resolve_model("h1.pt2", assets_root=tmp_path).checkpoint == target


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match="h2: no such model; known are lite0, h0"):
        resolve_model("h2")


def test_a_missing_file_is_a_checkpoint_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no\.pt2: no such file"):
        resolve_model(str(tmp_path / "no.pt2"))


def test_a_pinned_digest_is_kept_to(portable: Path) -> None:
    digest = file_sha256(portable)
    assert resolve_model(portable, sha256=digest.upper()).checkpoint == portable
    with pytest.raises(CheckpointError, match=f"sha256 is {digest}, not the one"):
        build_server_model(portable, sha256="0" * 64)
    with pytest.raises(UsageError, match="64 hexadecimal"):
        resolve_model(portable, sha256="abc")


def test_one_load_looks_at_the_file_once(
    portable: Path, example_slide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = TINY.with_(name="mask", output_kind="mask", embedding_dim=0)
    save_module(Mask(), mask, tmp_path / "mask.pt2")
    build_server_model("lite0")  # made, if it was not there
    looked_at: list[str] = []
    read = archive._read_archive

    def counted(path: Path, file: zipfile.ZipFile) -> archive.ArchiveInfo:
        looked_at.append(path.name)
        return read(path, file)

    monkeypatch.setattr(archive, "_read_archive", counted)
    name = build_server_model("lite0", use_compiled=False).checkpoint_path.name
    build_server_model(portable)
    open_segmenter(tmp_path / "mask.pt2")
    assert looked_at == [name, "tiny.pt2", "mask.pt2"]
    looked_at.clear()
    config = batch_run.RunConfig(inputs=(str(example_slide),), out=tmp_path / "out")
    (report,) = batch_run.run(config).reports
    assert (report.state, looked_at) == ("ok", [name])


def test_the_current_gpu_is_taken_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker thread's current GPU is the first, whatever the one that loaded the model."""
    assert wanted_device("auto") == ("cuda:0" if torch.cuda.is_available() else "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    given = ("auto", "cuda", "cuda:0", "cpu")
    assert [wanted_device(device) for device in given] == ["cuda:1", "cuda:1", "cuda:0", "cpu"]


def prepared(**given: str) -> list[str]:
    """OMP_WAIT_POLICY, AOTI_RUNTIME_CHECK_INPUTS, and what is set of torch's allocators."""
    code = (
        "import sys, os; from bioptimus.runtime.loader import prepare_environment\n"
        "prepare_environment(); assert 'torch' not in sys.modules\n"
        "print(os.environ.get('OMP_WAIT_POLICY'), os.environ['AOTI_RUNTIME_CHECK_INPUTS'],\n"
        "      *sorted(f'{k}={v}' for k, v in os.environ.items() if 'ALLOC_CONF' in k))"
    )
    ours = ("OMP_WAIT", "AOTI", "ALLOC_CONF")
    environment = {k: v for k, v in os.environ.items() if not any(word in k for word in ours)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, check=True, env=environment | given,
    )  # fmt: skip
    return done.stdout.split()


def test_torch_finds_its_environment_set_and_the_users_settings_kept() -> None:
    assert prepared()[:2] == ["PASSIVE", "1"]
    kept = {"OMP_WAIT_POLICY": "ACTIVE", "AOTI_RUNTIME_CHECK_INPUTS": "0"}
    assert prepared(**kept)[:2] == ["ACTIVE", "0"]
    assert prepared(GOMP_SPINCOUNT="0")[:2] == ["None", "1"]


@pytest.mark.skipif(sys.platform != "linux", reason="CUDA is of Linux")
@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, ["PYTORCH_ALLOC_CONF=pinned_free_catch_all:True"]),
        (
            {"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
            ["PYTORCH_ALLOC_CONF=expandable_segments:True,pinned_free_catch_all:True"],
        ),
        (  # of both, torch reads this one
            {"PYTORCH_ALLOC_CONF": "a:1", "PYTORCH_CUDA_ALLOC_CONF": "b:2"},
            ["PYTORCH_ALLOC_CONF=a:1", "PYTORCH_CUDA_ALLOC_CONF=b:2,pinned_free_catch_all:True"],
        ),
        (
            {"PYTORCH_ALLOC_CONF": "pinned_free_catch_all:False"},
            ["PYTORCH_ALLOC_CONF=pinned_free_catch_all:False"],
        ),
    ],
)
def test_a_lost_gpu_does_not_abort_the_process_whatever_else_is_set(
    given: dict[str, str], found: list[str]
) -> None:
    assert prepared(**given)[2:] == found


def test_build_server_model_is_offered_by_the_package_without_loading_torch() -> None:
    code = (
        "import sys; import bioptimus.runtime as r; assert 'torch' not in sys.modules\n"
        "print(r.build_server_model.__module__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "bioptimus.runtime.loader"
