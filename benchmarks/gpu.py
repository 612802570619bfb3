"""What ``benchmarks/gpu.sh`` runs: parity and speed of large models on one NVIDIA GPU."""

import argparse
import contextlib
import gc
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bioptimus.models.facts import FACTS, Facts, VitShape
from bioptimus.runtime.loader import prepare_environment

EXIT_NO_DEVICE = 3
# Callers at once in the timing of the model alone: one, and as many as keep copies and passes
# of different batches beside each other.
CALLERS = (1, 3)


@dataclass(kw_only=True)
class Bench:
    """What the steps share: where, how long, and the rows of the table so far."""

    device: str
    small: bool
    folder: Path
    deadline: float
    rows: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def row(self, step: str, what: str, value: str) -> None:
        self.rows.append((step, what, value))
        print(f"{step:12} {what:44} {value}")

    @contextmanager
    def step(self, name: str, *, needs_s: float) -> Iterator[None]:
        """A step that fails or has no time left is a row of the table, not the end of it."""
        print(f"-- {name} ({self.left_s:.0f} s left)", file=sys.stderr)
        if self.left_s < needs_s:
            raise SkippedError(f"{name}: skipped, {self.left_s:.0f} s left")
        yield


class SkippedError(Exception):
    """There is no time for this step."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks/gpu.sh", description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu to try the steps")
    parser.add_argument("--small", action="store_true", help="tiny models and slides")
    parser.add_argument("--minutes", type=float, default=9.0, help="begin no step after this")
    parser.add_argument("--json", type=Path, help="write the table here too")
    given = parser.parse_args()
    prepare_environment()
    import torch

    print(f"torch {torch.__version__}, python {platform.python_version()}, {os.cpu_count()} cores")
    if given.device.startswith("cuda") and not torch.cuda.is_available():
        print("device check: torch sees no NVIDIA GPU; nothing was measured", file=sys.stderr)
        return EXIT_NO_DEVICE
    with tempfile.TemporaryDirectory(prefix="bioptimus-gpu-") as name:
        os.environ["BIOPTIMUS_CACHE"] = f"{name}/cache"
        bench = Bench(
            device=given.device,
            small=given.small,
            folder=Path(name),
            deadline=time.monotonic() + 60 * given.minutes,
        )
        failed = _run(bench)
    print()
    for step, what, value in bench.rows:
        print(f"| {step} | {what} | {value} |")
    if given.json:
        given.json.write_text(json.dumps(bench.rows, indent=1))
    return 1 if failed else 0


def _run(bench: Bench) -> bool:
    models: dict[str, Path] = {}
    failed = False

    def attempt(step: Callable[[], None]) -> None:
        nonlocal failed
        try:
            step()
        except SkippedError as exc:
            bench.row("skipped", str(exc), "")
        # Whatever it is: time on such a machine is short, and the other steps can be had.
        except Exception as exc:  # noqa: BLE001
            failed = True
            traceback.print_exc()
            bench.row("FAILED", type(exc).__name__, (str(exc).splitlines() or [""])[0][:200])
        _release(bench)

    attempt(lambda: _describe(bench))
    # The smaller one first: what it shows is the most for the time.
    for key in ("vit-b", "h0"):
        attempt(lambda key=key: _export(bench, key, models))  # type: ignore[misc]
        if key in models:
            attempt(lambda key=key: _alone(bench, key, models[key], compiled=False))  # type: ignore[misc]
            attempt(lambda key=key: _compile(bench, key, models[key]))  # type: ignore[misc]
            attempt(lambda key=key: _alone(bench, key, models[key], compiled=True))  # type: ignore[misc]
        if key == "vit-b" and key in models:
            attempt(lambda: _end_to_end(bench, "vit-b", models["vit-b"]))
    if "h0" in models:
        attempt(lambda: _end_to_end(bench, "h0", models["h0"], workers=(8,)))
    return failed


def _release(bench: Bench) -> None:
    """Give back what a step took of the GPU: the next one may run in a process of its own."""
    gc.collect()
    if bench.device != "cpu":
        import torch

        with contextlib.suppress(RuntimeError):  # the GPU is lost; the next step says so
            torch.cuda.empty_cache()


def _describe(bench: Bench) -> None:
    import torch

    if bench.device == "cpu":
        bench.row("machine", "device", "cpu")
        return
    properties = torch.cuda.get_device_properties(bench.device)
    bench.row("machine", "GPU", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    major, minor = torch.cuda.get_device_capability(bench.device)
    bench.row("machine", "compute capability, CUDA", f"{major}.{minor}, {torch.version.cuda}")
    # How fast tiles can arrive at all.
    block = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(block, device=bench.device)
    target.copy_(block, non_blocking=True)
    torch.cuda.synchronize(bench.device)
    start = time.perf_counter()
    for _ in range(8):
        target.copy_(block, non_blocking=True)
    torch.cuda.synchronize(bench.device)
    rate = 8 * block.numel() / (time.perf_counter() - start)
    bench.row("machine", "host to device, pinned", f"{rate / 1e9:.1f} GB/s")


def _facts(bench: Bench, key: str) -> Facts:
    if key == "h0":
        facts = FACTS["h0"]
    else:
        base = FACTS["h0-mini"]
        shape = VitShape(patch_px=14, width=768, depth=12, heads=12, hidden=3072)
        facts = replace(base, key="vit-b", title="ViT-B/14, random weights", vit=shape)
    if not bench.small or facts.vit is None:
        return facts
    length = facts.vit.width // facts.vit.heads
    ratio = facts.vit.hidden / facts.vit.width
    small = replace(facts.vit, depth=1, heads=2, width=2 * length, hidden=2 * round(ratio * length))
    return replace(facts, vit=small, dim=2 * length)


def _export(bench: Bench, key: str, models: dict[str, Path]) -> None:
    from bioptimus.runtime.export import export_module
    from bioptimus.runtime.vit import random_vit

    facts = _facts(bench, key)
    assert facts.vit is not None
    precision = "fp32" if bench.device == "cpu" else "bf16"
    # The small model is traced on the CPU and moved when it is loaded, as users' files are; the
    # large one on the GPU, for the comparison's sake.
    device = bench.device if key == "h0" else "cpu"
    with bench.step(f"export {key}", needs_s=60):
        start = time.perf_counter()
        network = random_vit(facts.vit, depth=facts.vit.depth)
        size = sum(parameter.numel() for parameter in network.parameters()) / 1e6
        path = bench.folder / f"{key}.pt2"
        spec = facts.spec().with_(precision=precision)
        report = export_module(network, spec, path, device=device)
        models[key] = path
    bench.row("export", f"{key}, {size:.0f} M, {precision}", f"{time.perf_counter() - start:.0f} s")
    bench.row(
        "parity",
        f"{key} portable to eager {report.compared_to}",
        f"cosine {report.worst_random:.6f}",
    )


def _compile(bench: Bench, key: str, path: Path) -> None:
    from bioptimus.runtime.compilation import compile_portable
    from bioptimus.runtime.export import agreement, random_inputs
    from bioptimus.runtime.fitting import expected_inputs
    from bioptimus.runtime.runners import load_runner

    with bench.step(f"compile {key}", needs_s=90):
        start = time.perf_counter()
        compiled = compile_portable(path, device=bench.device)
        seconds = time.perf_counter() - start
        inputs = random_inputs(expected_inputs(_facts(bench, key).spec()), rows=32)
        wanted = load_runner(path, device=bench.device)(*inputs)
        found = load_runner(compiled, device=bench.device)(*inputs)
    bench.row("compile", f"{key} for {compiled.stem.split('-')[-2]}", f"{seconds:.0f} s")
    bench.row("parity", f"{key} compiled to portable", str(agreement(wanted, found)))


def _alone(bench: Bench, key: str, path: Path, *, compiled: bool) -> None:
    """Tiles per second of the model alone, from memory of the host to memory of the host."""
    from bioptimus.runtime.export import random_inputs
    from bioptimus.runtime.fitting import expected_inputs
    from bioptimus.runtime.loader import build_server_model

    kind = "compiled" if compiled else "portable"
    seconds = 0.3 if bench.small else 1.0
    sizes = (1, 8) if bench.small else (1, 8, 16, 32, 48, 64, 128, 256)
    with bench.step(f"{key} alone, {kind}", needs_s=len(sizes) * len(CALLERS) * seconds + 30):
        model = build_server_model(path, device=bench.device, use_compiled=compiled)
        runner: Any = model._runner
        if compiled and type(runner).__name__ != "CompiledRunner":
            raise SkippedError(f"{key}: no compiled file")
        for size in sizes:
            tiles = random_inputs(expected_inputs(model.model_spec), rows=size)[0]
            one, several = (_rate(runner, tiles, callers, seconds) for callers in CALLERS)
            bench.row(
                "alone",
                f"{key} {kind}, batch {size}, {CALLERS[0]} / {CALLERS[1]} callers",
                f"{one:.0f} / {several:.0f} tiles/s (overlap x{several / one:.2f})",
            )


def _rate(runner: Callable[..., object], tiles: Any, callers: int, seconds: float) -> float:
    """Tiles per second of all callers together."""
    ready = threading.Barrier(callers, timeout=60)

    def call() -> float:
        try:
            # A thread's first pass pays for its stream's memory and for its libraries' handles.
            runner(tiles)
        except BaseException:
            ready.abort()
            raise
        ready.wait()
        done, start = 0, time.perf_counter()
        while (passed := time.perf_counter() - start) < seconds:
            runner(tiles)
            done += len(tiles)
        return done / passed

    with ThreadPoolExecutor(callers) as threads:
        calls = [threads.submit(call) for _ in range(callers)]
    failures = [error for each in calls if (error := each.exception())]
    # One that failed breaks the others' wait; its own words are the ones to tell.
    for error in sorted(
        failures, key=lambda error: isinstance(error, threading.BrokenBarrierError)
    ):
        raise error
    return sum(each.result() for each in calls)


def _end_to_end(
    bench: Bench, key: str, path: Path, *, workers: tuple[int, ...] = (1, 2, 4, 8, 16)
) -> None:
    count, side = (2, 2_048) if bench.small else (16, 16_384)
    if bench.small:
        workers = (1, 2)
    slides = bench.folder / "slides"
    if not slides.exists():
        slides.mkdir()
        first = _write_slide(slides / "slide-00.tif", side)
        for number in range(1, count):
            # One file under many names: reading it is as much work, and the disk stays small.
            os.link(first, slides / f"slide-{number:02d}.tif")
    few = bench.folder / "one"
    if not few.exists():
        few.mkdir()
        _write_slide(few / "small.tif", 1_024)
    start_up = min(_embed(bench, few, path, workers=1)[0] for _ in range(2))
    for number in workers:
        with bench.step(f"{key} embed, {number} workers", needs_s=45), _busy(bench) as busy:
            seconds, tiles = _embed(bench, slides, path, workers=number)
        share = f", GPU busy {statistics.mean(busy):.0f} %" if busy else ""
        rate = tiles / max(seconds - start_up, 1e-3)
        bench.row(
            "end to end",
            f"{key}, {count} slides, {tiles} tiles, {number} workers",
            f"{rate:.0f} tiles/s ({seconds:.0f} s, start-up {start_up:.0f} s){share}",
        )


def _embed(bench: Bench, slides: Path, model: Path, *, workers: int) -> tuple[float, int]:
    """Seconds on the clock and tiles done of one ``bioptimus embed`` in a process of its own."""
    out = bench.folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-m", "cli", "embed", str(slides), "--model", str(model)]
    command += ["--device", bench.device, "--workers", str(workers), "--out", str(out)]
    command += ["--tissue", "none"]
    start = time.perf_counter()
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=max(30.0, bench.left_s + 60)
    )
    seconds = time.perf_counter() - start
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise RuntimeError(f"embed ended with {done.returncode}: {' '.join(last)}")
    lines = [json.loads(line) for file in (out / "runs").glob("*.json")
             for line in file.read_text().splitlines()]  # fmt: skip
    return seconds, sum(line["tiles_done"] for line in lines if line["kind"] == "slide")


@contextmanager
def _busy(bench: Bench) -> Iterator[list[int]]:
    """Utilisation in percent as nvidia-smi samples it five times a second."""
    samples: list[int] = []
    if bench.device == "cpu" or shutil.which("nvidia-smi") is None:
        yield samples
        return
    import torch

    # By its own name: CUDA_VISIBLE_DEVICES numbers GPUs anew, for torch alone.
    name = f"GPU-{torch.cuda.get_device_properties(bench.device).uuid}"
    command = ["nvidia-smi", "-i", name, "--query-gpu=utilization.gpu"]
    command += ["--format=csv,noheader,nounits", "-lms", "200"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watcher:
        try:
            yield samples
        finally:
            watcher.terminate()
            text = watcher.stdout.read() if watcher.stdout else ""
            samples += [int(line) for line in text.split() if line.isdigit()]


def _write_slide(path: Path, side: int) -> Path:
    """A tiled JPEG pyramid of real tissue at 0.5 µm/px: a few tiles, encoded once, repeated."""
    import cv2
    import imagecodecs
    import numpy as np
    import openslide
    import tifffile

    example = Path(__file__).parent.parent / "examples" / "CMU-1-Small-Region.svs"
    with openslide.OpenSlide(example) as slide:
        tissue = np.asarray(slide.read_region((150, 700), 0, (2048, 2048)).convert("RGB"))
    with tifffile.TiffWriter(path) as writer:
        for factor in (1, 4, 16):
            small = cv2.resize(
                tissue, (2048 // factor, 2048 // factor), interpolation=cv2.INTER_AREA
            )
            small = np.tile(small, (max(1, 256 * factor // 2048),) * 2 + (1,))
            parts = len(small) // 256
            tiles = [
                [
                    bytes(
                        imagecodecs.jpeg8_encode(
                            small[y * 256 : y * 256 + 256, x * 256 : x * 256 + 256], level=85
                        )
                    )
                    for x in range(parts)
                ]
                for y in range(parts)
            ]
            count = -(-side // factor // 256)
            writer.write(
                (tiles[y % parts][x % parts] for y in range(count) for x in range(count)),
                shape=(side // factor, side // factor, 3),
                dtype=np.uint8,
                tile=(256, 256),
                photometric="ycbcr",
                compression="jpeg",
                resolution=(20_000 / factor, 20_000 / factor),
                resolutionunit="CENTIMETER",
                subfiletype=0 if factor == 1 else 1,
                metadata=None,
            )
    return path


if __name__ == "__main__":
    sys.exit(main())
