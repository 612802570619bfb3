"""A file is known for what it is before anything in it can run, crash or lie."""

import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bioptimus.errors import CheckpointError
from bioptimus.runtime import archive, machine
from bioptimus.runtime.archive import file_sha256, inspect_archive
from bioptimus.runtime.machine import check_machine
from tests.tiny_models import TINY, save_foreign, save_tiny, tiny


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIOPTIMUS_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def portable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("archive") / "tiny.pt2")


def elf(machine: int = 62, *, size: int = 4096, table: int = 1024) -> bytes:
    """A header that says: 64-bit code for ``machine``, section table at ``table``."""
    head = bytearray(size)
    head[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<H", head, 18, machine)
    struct.pack_into("<Q", head, 40, table)
    struct.pack_into("<HH", head, 58, 64, 4)
    return bytes(head)


def write_compiled(path: Path, *, code: bytes | None = None, **facts: str) -> Path:
    """An archive laid out as AOTInductor's, whose machine code is never run."""
    metadata = {
        "AOTI_DEVICE_KEY": "cpu", "AOTI_PLATFORM": "linux", "AOTI_MACHINE": os.uname().machine,
        "AOTI_CPU_ISA": "AVX2", "AOTI_COMPUTE_CAPABILITY": "", **facts,
    }  # fmt: skip
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("c/archive_format", "pt2")
        file.writestr("c/data/aotinductor/model/a.wrapper_metadata.json", json.dumps(metadata))
        file.writestr("c/data/aotinductor/model/a.wrapper.so", elf() if code is None else code)
    return path


def test_a_portable_file_says_everything_without_torch(portable: Path) -> None:
    code = (
        "import sys, pathlib; from bioptimus.runtime.archive import inspect_archive, file_sha256\n"
        "info = inspect_archive(pathlib.Path(sys.argv[1])); file_sha256(info.path)\n"
        "print(info.kind, info.device, info.torch_version, info.spec.name, info.spec.licence)\n"
        "print(*info.signature.inputs, *info.signature.outputs, info.signature.max_batch)\n"
        "print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(portable)], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        f"portable any {torch.__version__.partition('+')[0]} tiny CC0-1.0",
        "uint8 (N, 8, 8, 3) float32 (N, 5) 1024",
        "False False",
    ]


def test_the_description_survives_whole(portable: Path) -> None:
    assert inspect_archive(portable).spec == TINY


def test_a_foreign_portable_file_has_no_description_but_a_signature(tmp_path: Path) -> None:
    info = inspect_archive(save_foreign(tmp_path / "foreign.pt2", largest=8))
    assert info.spec is None
    assert info.signature is not None
    assert (info.signature.min_batch, info.signature.max_batch) == (1, 8)
    fixed = inspect_archive(save_foreign(tmp_path / "fixed.pt2", largest=None)).signature
    assert fixed is not None
    assert (fixed.min_batch, fixed.max_batch) == (4, 4)


def test_a_program_of_multiples_of_tiles_is_refused(tmp_path: Path) -> None:
    path, example = tmp_path / "eights.pt2", torch.zeros((16, 8, 8, 3), dtype=torch.uint8)
    shapes = ({0: 8 * torch.export.Dim("eights", min=1, max=4)},)
    torch.export.save(torch.export.export(tiny(), (example,), dynamic_shapes=shapes), path)
    # Its bounds were taken for those of the eights, and each pass failed.
    with pytest.raises(CheckpointError, match=r"eights.pt2: takes only some numbers of tiles"):
        inspect_archive(path)


def test_a_file_tells_nothing_of_the_folders_it_was_made_in(portable: Path) -> None:
    here = str(Path(__file__).resolve().parent).encode()
    with zipfile.ZipFile(portable) as file:
        assert [name for name in file.namelist() if here in file.read(name)] == []


def test_the_same_weights_give_the_same_bytes(tmp_path: Path) -> None:
    first, second = save_tiny(tmp_path / "a.pt2"), save_tiny(tmp_path / "b.pt2")
    assert file_sha256(first) == file_sha256(second)


def folder(path: Path) -> None:
    path.mkdir()


def empty(path: Path) -> None:
    path.touch()


def text(path: Path) -> None:
    path.write_text("these are not the weights")


def other_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a/b.txt", "hello")


def empty_zip(path: Path) -> None:
    zipfile.ZipFile(path, "w").close()


def torch_save(path: Path) -> None:
    torch.save(tiny().state_dict(), path)


def old_torch_save(path: Path) -> None:
    path.write_bytes(pickle.dumps({"weight": [1.0]}, protocol=2))


def torch_script(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("m/data.pkl", b"\x80\x02.")
        file.writestr("m/constants.pkl", b"\x80\x02.")
        file.writestr("m/code/__torch__.py", "")


def safetensors(path: Path) -> None:
    head = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + bytes(4))


def lfs_pointer(path: Path) -> None:
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")


def no_model(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("p/archive_format", "pt2")


def climbing(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("p/archive_format", "pt2")
        file.writestr("p/../../evil.so", "x")


def garbled_program(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("p/archive_format", "pt2")
        file.writestr("p/models/model.json", "{}")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, "no such file"),
        (folder, "a folder, not a .pt2 file"),
        (empty, "empty file"),
        (text, "not a .pt2 archive"),
        (other_zip, "a zip archive, but not a .pt2"),
        (empty_zip, "a zip archive, but not a .pt2"),
        (torch_save, "a torch.save file"),
        (old_torch_save, "a pickled torch.save file"),
        (torch_script, "a TorchScript file"),
        (safetensors, "a safetensors file"),
        (lfs_pointer, "git lfs pull"),
        (no_model, "holds no model"),
        (climbing, "do not trust"),
        (garbled_program, "unknown form"),
    ],
    ids=lambda value: getattr(value, "__name__", "") if callable(value) else "",
)
def test_each_other_kind_of_file_is_called_by_its_name(
    tmp_path: Path, make: Callable[[Path], None], words: str
) -> None:
    path = tmp_path / "model.pt2"
    make(path)
    with pytest.raises(CheckpointError, match=f"model.pt2: .*{words}") as caught:
        inspect_archive(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kept", [0.3, 0.98])
def test_a_file_cut_short_is_truncated(tmp_path: Path, portable: Path, kept: float) -> None:
    content = portable.read_bytes()
    short = tmp_path / "short.pt2"
    short.write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(CheckpointError, match="truncated"):
        inspect_archive(short)


def test_weights_altered_in_place_are_found_by_their_checksum(
    tmp_path: Path, portable: Path
) -> None:
    path = tmp_path / "altered.pt2"
    shutil.copy(portable, path)
    inspect_archive(path)  # found whole, and remembered
    status = path.stat()
    with zipfile.ZipFile(path) as file:
        weights = next(entry for entry in file.infolist() if entry.filename.endswith("weight_0"))
        raw = file.read(weights)
    at = path.read_bytes().index(raw)
    with path.open("r+b") as out:
        out.seek(at)
        out.write(bytes(byte ^ 255 for byte in raw))
    # Even with its old modification time: that alone must not make it pass for the old file.
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(CheckpointError, match="weight_0 is damaged"):
        inspect_archive(path)


def test_a_digest_is_computed_once_and_again_when_the_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    real = archive._digest

    def digest(path: Path) -> str:
        read.append(path)
        return real(path)

    monkeypatch.setattr(archive, "_digest", digest)
    path = tmp_path / "a.bin"
    path.write_bytes(b"one")
    first = file_sha256(path)
    assert (file_sha256(path), len(read)) == (first, 1)
    path.write_bytes(b"two")
    assert (file_sha256(path) == first, len(read)) == (False, 2)


def test_a_cache_that_cannot_be_written_is_no_obstacle(
    tmp_path: Path, portable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "a file"
    blocked.write_text("")
    monkeypatch.setenv("BIOPTIMUS_CACHE", str(blocked / "cache"))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    assert inspect_archive(portable).spec == TINY
    assert len(file_sha256(portable)) == 64


def test_a_compiled_file_says_what_machine_it_needs(tmp_path: Path) -> None:
    info = inspect_archive(write_compiled(tmp_path / "c.pt2"))
    assert (info.kind, info.device, info.isa, info.system) == ("compiled", "cpu", "AVX2", "linux")
    assert info.library == "data/aotinductor/model/a.wrapper.so"
    assert info.signature is None


def test_the_batch_limit_is_read_from_the_programs_own_check(tmp_path: Path) -> None:
    path = write_compiled(tmp_path / "c.pt2")
    assert inspect_archive(path).batch_limit is None
    with zipfile.ZipFile(path, "a") as file:
        file.writestr(
            "c/data/aotinductor/model/a.wrapper.cpp",
            'ss << "input_handles[0]: dim value is too large at 0, "\n'
            '           << "expected to be <= 15, " << "but got: "\n'
            'ss << "input_handles[1]: dim value is too large at 0, "\n'
            '           << "expected to be <= 99, " << "but got: "\n',
        )
    assert inspect_archive(path).batch_limit == 15


@pytest.mark.skipif(sys.platform != "linux", reason="ELF is Linux's")
@pytest.mark.parametrize(
    ("code", "words"),
    [
        (elf(size=512), "cut short"),
        (bytes(4096), "damaged"),
        (b"", "damaged"),
        (elf(machine=243), "compiled for machine 243"),
    ],
    ids=["short", "zeroed", "empty", "other machine"],
)
def test_machine_code_that_would_kill_the_process_is_refused(
    tmp_path: Path, code: bytes, words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        inspect_archive(write_compiled(tmp_path / "c.pt2", code=code))


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"AOTI_PLATFORM": "win32"}, "compiled for win32"),
        ({"AOTI_MACHINE": "sparc"}, "compiled for sparc"),
        ({"AOTI_CPU_ISA": "AVX2 AMX_TILE"}, "a CPU with AMX_TILE"),
    ],
)
def test_a_compiled_file_for_another_machine_is_refused_before_loading(
    tmp_path: Path, facts: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "processor_features", lambda: frozenset({"AVX2", "FMA"}))
    info = inspect_archive(write_compiled(tmp_path / "c.pt2", code=None, **facts))
    with pytest.raises(CheckpointError, match=words):
        check_machine(info)


def test_a_compiled_file_for_this_machine_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "processor_features", lambda: frozenset({"AVX2", "FMA"}))
    check_machine(inspect_archive(write_compiled(tmp_path / "c.pt2")))
    check_machine(inspect_archive(write_compiled(tmp_path / "d.pt2", AOTI_CPU_ISA="SOMETHING")))
