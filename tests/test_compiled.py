"""Compiled files: same bits by both ways of calling, no lock held, nothing that can crash."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

from bioptimus.errors import CheckpointError, UsageError, _ForwardError
from bioptimus.runtime import compilation
from bioptimus.runtime.archive import file_sha256, inspect_archive
from bioptimus.runtime.cache import cache_folder
from bioptimus.runtime.compilation import compile_portable, compiled_path
from bioptimus.runtime.compiled import CompiledRunner, unpack
from bioptimus.runtime.loader import build_server_model
from bioptimus.runtime.runners import CheckedRunner, load_runner, open_runner
from tests.gpu_stand_in import StandIn
from tests.tiny_models import TINY, random_tiles, save_module

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="compiling needs g++"),
    pytest.mark.skipif(sys.platform != "linux", reason="compiled files are tested on Linux"),
]

SLOW = TINY.with_(name="slow", embedding_dim=6)


class Slow(nn.Module):
    """Few weights and many multiplications: a pass of 1,024 tiles takes some 0.2 s.

    The convolution is there because torch asks, on a CPU, whether its batch has 16 rows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv2d(3, 3, 1)
        self.first = nn.Linear(192, 1024)
        self.again = nn.Linear(1024, 1024)

    def forward(self, tiles: torch.Tensor) -> torch.Tensor:
        values = self.first(self.mix(tiles.permute(0, 3, 1, 2).float() / 255).flatten(1))
        for _ in range(10):
            values = torch.tanh(self.again(values))
        result: torch.Tensor = values[:, :6].clone()
        return result


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    patch = pytest.MonkeyPatch()
    patch.setenv("BIOPTIMUS_CACHE", str(folder))
    return folder


@pytest.fixture(scope="module")
def portable(cache: Path) -> Path:
    torch.manual_seed(1)
    return save_module(Slow(), SLOW, cache / "slow.pt2")


@pytest.fixture(scope="module")
def compiled(portable: Path) -> Path:
    return compile_portable(portable)


@pytest.fixture(scope="module")
def runner(compiled: Path) -> CompiledRunner:
    opened = open_runner(compiled, device="cpu", spec=SLOW)
    assert isinstance(opened, CompiledRunner)
    return opened


def rewritten(source: Path, target: Path, **facts: str | None) -> Path:
    """A copy whose metadata says something else."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for entry in old.infolist():
            content = old.read(entry)
            if entry.filename.endswith("_metadata.json"):
                changed = {**json.loads(content), **facts}
                content = json.dumps({k: v for k, v in changed.items() if v is not None}).encode()
            new.writestr(entry.filename, content)
    return target


def test_a_compiled_file_carries_the_description_and_its_source(
    compiled: Path, portable: Path
) -> None:
    info = inspect_archive(compiled)
    assert (info.kind, info.device, info.spec) == ("compiled", "cpu", SLOW)
    assert info.source_sha256 == file_sha256(portable)
    assert info.torch_version == torch.__version__
    assert info.signature == inspect_archive(portable).signature


@pytest.mark.parametrize("count", [0, 1, 2, 48, 1024, 1030])
def test_batches_of_any_length_equal_the_portable_program(
    runner: CompiledRunner, portable: Path, count: int
) -> None:
    expected = load_runner(portable, device="cpu")(random_tiles(count))[0]
    found = runner(random_tiles(count))[0]
    assert found.shape == (count, 6)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_both_ways_of_calling_give_the_same_bits(runner: CompiledRunner, compiled: Path) -> None:
    info = inspect_archive(compiled)
    official = CompiledRunner(info, runner.signature, device="cpu", slots=1, official=True)
    for count in (1, 3, 48):
        assert torch.equal(runner(random_tiles(count))[0], official(random_tiles(count))[0])


def test_a_torch_without_the_private_functions_gets_the_official_call(
    runner: CompiledRunner, compiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch._C._aoti, "alloc_tensors_by_stealing_from_void_ptrs")
    other = open_runner(compiled, device="cpu", spec=SLOW)
    assert isinstance(other, CompiledRunner)
    assert type(other._program) is not type(runner._program)
    monkeypatch.undo()
    assert torch.equal(runner(random_tiles(5))[0], other(random_tiles(5))[0])


def test_a_program_that_needs_torchs_own_loader_gets_it(
    runner: CompiledRunner, compiled: Path, tmp_path: Path
) -> None:
    target = tmp_path / "proxy.pt2"
    shutil.copy(compiled, target)
    with zipfile.ZipFile(target, "a") as file:
        library = inspect_archive(compiled).library
        name = library.removesuffix(".so") + ".json"
        file.writestr(f"{inspect_archive(compiled).root}/{name}", '{"nodes": []}')
    other = open_runner(target, device="cpu", spec=SLOW)
    assert isinstance(other, CompiledRunner)
    assert type(other._program) is not type(runner._program)
    assert torch.equal(runner(random_tiles(5))[0], other(random_tiles(5))[0])


def ticks_during_a_pass(runner: CheckedRunner) -> int:
    """How often another thread, waking each half millisecond, ran Python during one pass."""
    ticks = 0
    stop = threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not stop.is_set():
            ticks += 1
            time.sleep(0.0005)

    ticker = threading.Thread(target=tick)
    inputs = [random_tiles(1024)]
    ticker.start()
    try:
        before = ticks
        with torch.inference_mode():
            runner.compute(inputs)
        return ticks - before
    finally:
        stop.set()
        ticker.join()


def test_other_threads_run_during_a_pass(runner: CompiledRunner, portable: Path) -> None:
    # While the lock is held nobody ticks: one or two at the edges. The best of several passes,
    # since other programs may keep the ticker from running.
    for each in (runner, load_runner(portable, device="cpu")):
        assert isinstance(each, CheckedRunner)
        assert max(ticks_during_a_pass(each) for _ in range(5)) >= 10


def test_eight_threads_get_the_bits_of_one(runner: CompiledRunner) -> None:
    expected = {count: runner(random_tiles(count))[0] for count in range(1, 8)}
    wrong: list[int] = []

    def ask(offset: int) -> None:
        for number in range(20):
            count = (number + offset) % 7 + 1
            if not torch.equal(runner(random_tiles(count))[0], expected[count]):
                wrong.append(count)

    threads = [threading.Thread(target=ask, args=(offset,)) for offset in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_pass_leaves_no_hidden_owner_of_its_outputs(runner: CompiledRunner) -> None:
    tiles = random_tiles(4)
    with torch.inference_mode():
        (output,) = runner.compute([tiles])
    # The obvious helper of torch, in the singular, gives tensors that nobody ever frees.
    assert output._use_count() == 1  # type: ignore[attr-defined]  # not in the stubs
    assert tiles._use_count() == 1  # type: ignore[attr-defined]


_SHORT_OF_MEMORY = """
import resource, sys
from pathlib import Path
import torch
from bioptimus.errors import OutOfDeviceMemoryError
from bioptimus.runtime.runners import load_runner
runner = load_runner(Path(sys.argv[1]), device="cpu")
tiles = torch.zeros((1024, 8, 8, 3), dtype=torch.uint8)
runner(tiles[:16])
pages = int(Path("/proc/self/statm").read_text().split()[0])
before = resource.getrlimit(resource.RLIMIT_AS)
limit = pages * resource.getpagesize() + (2 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
try:
    runner(tiles)
except OutOfDeviceMemoryError as exc:
    print(exc)
resource.setrlimit(resource.RLIMIT_AS, before)
"""


def test_a_compiled_pass_that_lacks_memory_says_so(compiled: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SHORT_OF_MEMORY, str(compiled)],
        capture_output=True, text=True, check=False, timeout=60,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert "out of memory in the forward pass" in done.stdout, done.stderr
    assert "allocate memory" in done.stdout


def wrong_inputs() -> dict[str, torch.Tensor]:
    tiles = random_tiles(2)
    return {
        "height": tiles[:, :4],
        "channels": tiles[..., :1],
        "layout": tiles.permute(0, 3, 1, 2),
        "float": tiles.float(),
        "no batch": tiles[0],
        "elsewhere": torch.empty((2, 8, 4, 3), dtype=torch.uint8, device="meta"),
    }


@pytest.mark.parametrize("name", list(wrong_inputs()))
def test_what_would_give_garbage_or_crash_is_refused(runner: CompiledRunner, name: str) -> None:
    with pytest.raises(_ForwardError, match=r"takes uint8 \(N, 8, 8, 3\), got"):
        runner(wrong_inputs()[name])
    with pytest.raises(_ForwardError, match="takes 1 inputs"):
        runner(random_tiles(2), random_tiles(2))


def test_strided_memory_gives_the_bits_of_contiguous_memory(runner: CompiledRunner) -> None:
    wide = torch.zeros((3, 8, 16, 3), dtype=torch.uint8)
    wide[:, :, ::2] = random_tiles(3)
    expected = runner(random_tiles(3))[0]
    assert torch.equal(runner(wide[:, :, ::2])[0], expected)
    planar = random_tiles(3).permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    assert torch.equal(runner(planar)[0], expected)


def test_nothing_is_left_in_the_temporary_folder(
    compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    open_runner(compiled, device="cpu", spec=SLOW)
    assert list(tmp_path.iterdir()) == []


def test_an_unpacked_file_that_lost_a_part_is_unpacked_again(compiled: Path) -> None:
    info = inspect_archive(compiled)
    folder = unpack(info)
    before = (folder / info.library).stat().st_mtime_ns
    assert (unpack(info) / info.library).stat().st_mtime_ns == before
    (folder / info.library).unlink()
    unpack(info)
    assert (folder / info.library).stat().st_size > 0
    assert [path for path in cache_folder("unpacked").iterdir() if path.name[0] == "."] == []


def test_hostile_files_end_in_an_error_and_not_in_a_crash(compiled: Path, tmp_path: Path) -> None:
    library = inspect_archive(compiled).library
    with zipfile.ZipFile(compiled) as old:
        code = old.read(f"{inspect_archive(compiled).root}/{library}")
        for name, content in {"cut": code[: len(code) // 2], "zeroed": bytes(len(code))}.items():
            with zipfile.ZipFile(tmp_path / f"{name}.pt2", "w") as new:
                for entry in old.infolist():
                    new.writestr(
                        entry.filename,
                        content if entry.filename.endswith(library) else old.read(entry),
                    )
    whole = compiled.read_bytes()
    at = whole.index(code) + len(code) // 2
    (tmp_path / "altered.pt2").write_bytes(whole[:at] + bytes(4096) + whole[at + 4096 :])
    (tmp_path / "short.pt2").write_bytes(whole[:-100])
    rewritten(compiled, tmp_path / "machine.pt2", AOTI_MACHINE="riscv64")
    rewritten(compiled, tmp_path / "cuda.pt2", AOTI_DEVICE_KEY="cuda")
    script = (
        "import sys, pathlib\n"
        "from bioptimus.errors import CheckpointError\n"
        "from bioptimus.runtime.runners import open_runner\n"
        "from tests.test_compiled import SLOW\n"
        "for name in sys.argv[2:]:\n"
        "    try:\n"
        "        open_runner(pathlib.Path(sys.argv[1], name + '.pt2'), device='cpu', spec=SLOW)\n"
        "        print(name, 'loaded')\n"
        "    except CheckpointError as exc: print(name, str(exc).partition('.pt2: ')[2])\n"
    )
    names = ["cut", "zeroed", "altered", "short", "machine", "cuda"]
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), *names],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    for name, words in zip(
        names,
        ["cut short", "damaged", "wrong checksum", "truncated", "compiled for riscv64",
         "compiled for cuda, asked to run on cpu"],
        strict=True,
    ):  # fmt: skip
        assert words in said[name], name


def test_a_foreign_compiled_file_is_held_to_the_spec(compiled: Path, tmp_path: Path) -> None:
    foreign = rewritten(compiled, tmp_path / "foreign.pt2", bioptimus=None)
    assert inspect_archive(foreign).signature is None
    runner = open_runner(foreign, device="cpu", spec=SLOW)
    assert runner(random_tiles(3))[0].shape == (3, 6)
    pair = SLOW.with_(output_kind="prediction_and_embedding", prediction_dim=2)
    with pytest.raises(CheckpointError, match="has 1 inputs and 1 outputs, expected 1 and 2"):
        open_runner(foreign, device="cpu", spec=pair)


def test_a_file_of_another_torch_is_announced(
    compiled: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with zipfile.ZipFile(compiled) as file:
        name = next(name for name in file.namelist() if name.endswith("wrapper_metadata.json"))
        own = json.loads(json.loads(file.read(name))["bioptimus"])
    older = json.dumps({**own, "torch": "2.9.0"})
    open_runner(rewritten(compiled, tmp_path / "old.pt2", bioptimus=older), device="cpu", spec=SLOW)
    assert "compiled by torch 2.9.0" in caplog.text


def test_compiling_again_takes_the_file_that_is_there(
    compiled: Path, portable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilation, "_compiler", lambda: pytest.fail("compiled again"))
    told: list[str] = []
    assert compile_portable(portable, tell=told.append) == compiled
    assert told == [f"{portable}: was compiled for this machine before"]
    with pytest.raises(UsageError, match="is compiled already"):
        compile_portable(compiled)


def test_without_a_compiler_the_error_says_that_the_portable_file_runs(
    portable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(CheckpointError, match=r"no C\+\+ compiler"):
        compile_portable(portable, again=True)


def test_a_program_that_gives_nan_by_itself_is_told_as_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    broken = Slow()
    nn.init.constant_(broken.again.bias, torch.nan)
    path = save_module(broken, SLOW, tmp_path / "nan.pt2")
    monkeypatch.setattr(compilation, "_compile", lambda *_, **__: None)
    with pytest.raises(CheckpointError, match=r"nan\.pt2: the program itself gives NaN or infin"):
        compile_portable(path)


def test_what_the_cpp_compiler_lacks_is_told(
    portable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError(
            "CppCompileError: C++ compile error\n\nCommand:\ng++ -O1\n\nOutput:\nIn file included\n"
            "cuda_fp16.h:4492:10: fatal error: nv/target: No such file or directory\n 4492 | #inc"
        )

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", fail)
    complaint = r"cannot be compiled: CppCompileError: C\+\+ compile error: cuda_fp16.h.*nv/target"
    with pytest.raises(CheckpointError, match=complaint):
        compile_portable(portable, again=True)


def test_without_the_cuda_toolkit_no_file_is_said_to_be_unwritable(
    portable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    StandIn(monkeypatch)
    with pytest.raises(CheckpointError, match=r"^no CUDA toolkit \(nvcc\) found"):
        compile_portable(portable, device="cuda:1")
    with pytest.raises(UsageError, match=r"cuda:2: there are 2 GPUs here"):
        compile_portable(portable, device="cuda:2")


def test_a_model_runs_compiled_where_a_twin_was_made(compiled: Path, portable: Path) -> None:
    model = build_server_model(portable)
    assert isinstance(model._runner, CompiledRunner)
    assert model.checkpoint_path == portable
    assert model.checkpoint_sha256 == file_sha256(portable)
    other = build_server_model(portable, use_compiled=False)
    assert not isinstance(other._runner, CompiledRunner)
    # The files of both name the same model: this tells them apart.
    assert (model.is_compiled, other.is_compiled) == (True, False)


def test_a_damaged_twin_is_passed_over_and_made_again(
    compiled: Path,
    portable: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = compiled.read_bytes()
    try:
        compiled.write_bytes(whole[:1000])
        model = build_server_model(portable)
        assert not isinstance(model._runner, CompiledRunner)
        assert "truncated" in caplog.text
        # Compiling does not take it for made already: it goes on as far as the compiler.
        monkeypatch.setattr(compilation, "_compiler", lambda: None)
        with pytest.raises(CheckpointError, match="no C"):
            compile_portable(portable)
    finally:
        compiled.write_bytes(whole)


def test_twins_for_other_processors_have_other_names(
    portable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = compiled_path(inspect_archive(portable), device="cpu")
    assert torch.__version__ in here.name
    monkeypatch.setattr(compilation, "processor_features", lambda: frozenset({"AVX2"}))
    assert compiled_path(inspect_archive(portable), device="cpu") != here
    assert compiled_path(inspect_archive(portable), device="cpu", isa="avx2").name.endswith(
        "-avx2-fp32.pt2"
    )
