"""Is this machine ready for a night of slides? Each part is tried, not looked up."""

import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from bioptimus.errors import BioptimusError, OutputError

Status = Literal["ok", "warning", "problem"]

DISTRIBUTION = "bioptimus-wsi"

# A result file of a large slide is about 0.6 GB; below the first a run ends soon, below the
# second it cannot even begin.
_LOW_SPACE_BYTES = 10 << 30
_NO_SPACE_BYTES = 200 << 20

# A worker holds a slide, its reopened handle, a part file and a claim; libraries take the rest.
_WANTED_FILES = 1024

_LIBRARIES = ("numpy", "tifffile", "cv2", "PIL", "orjson", "pybase64", "rich")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the doctor's report.

    Attributes:
        name: What was examined, one or two words.
        status: ``problem`` means that a run would fail or lie; ``warning`` that it will be
            slower or lacks something optional.
        fact: What was found.
        advice: What to do; empty when all is well.
    """

    name: str
    status: Status
    fact: str
    advice: str = ""

    def to_dict(self) -> dict[str, str]:
        """Plain JSON-ready types."""
        return asdict(self)


def examine(*, out: Path, with_model: bool = True) -> Iterator[Finding]:
    """Try everything that a run needs, one finding after another, as they come.

    Args:
        out: Folder that results would go to; made and removed again where it is missing.
        with_model: Whether to load the built-in model and run it on a tile, which takes
            seconds.

    Yields:
        At least one finding for each part. None of the parts can stop the others.
    """
    parts: list[tuple[str, Callable[[], Iterable[Finding]]]] = [
        ("bioptimus", _versions),
        ("command", _command),
        ("libraries", _libraries),
        ("openslide", _openslide),
        ("hdf5", _hdf5),
        ("torch", _torch),
        ("processor", _processor),
        ("cuda", _cuda),
        ("pictures", _pictures),
        ("reader", _reader),
        ("output folder", lambda: _folder(out)),
        ("temporary folder", _temporary_folder),
        ("cache folder", _cache_folder),
        ("open files", _open_files),
    ]
    if with_model:
        parts.append(("built-in model", _model))
    for name, part in parts:
        yield from _outlived(name, part)


def _outlived(name: str, part: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    try:
        yield from part()
    except BioptimusError as exc:
        yield Finding(name=name, status="problem", fact=str(exc), advice="see the message")
    # A broken library may raise anything while it loads, and the other lines are needed then
    # more than ever.
    except Exception as exc:  # noqa: BLE001
        yield Finding(
            name=name,
            status="problem",
            fact=f"{type(exc).__name__}: {exc}",
            advice=f"reinstall: pip install --force-reinstall {DISTRIBUTION}",
        )


def _ok(name: str, fact: str) -> Finding:
    return Finding(name=name, status="ok", fact=fact)


def _versions() -> Iterator[Finding]:
    from bioptimus import __version__

    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    yield _ok("bioptimus", f"{__version__}, Python {platform.python_version()}, {system}")


def _command() -> Iterator[Finding]:
    """Another package may bring the same import name or the same command."""
    owners = metadata.packages_distributions().get("bioptimus", [])
    others = sorted({owner for owner in owners if owner != DISTRIBUTION})
    if others:
        yield Finding(
            name="command",
            status="problem",
            fact=f"the package {', '.join(others)} is installed under the name bioptimus too",
            advice=f"use an environment of its own for {DISTRIBUTION}: the two overwrite each "
            "other's files",
        )
        return
    found = shutil.which("bioptimus")
    own = Path(sys.executable).parent / "bioptimus"
    if found is None:
        yield _ok("command", f"run as {Path(sys.argv[0]).name}; `bioptimus` is not on the PATH")
    elif own.exists() and Path(found).resolve() != own.resolve():
        yield Finding(
            name="command",
            status="warning",
            fact=f"typing bioptimus starts {found}, not the one of this Python, {own}",
            advice=f"put {own.parent} first on the PATH, or activate this environment",
        )
    else:
        yield _ok("command", found)


def _libraries() -> Iterator[Finding]:
    import importlib

    words = []
    for name in _LIBRARIES:
        module = importlib.import_module(name)
        words.append(f"{name} {getattr(module, '__version__', '') or _installed(name)}".strip())
    yield _ok("libraries", ", ".join(words))


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _openslide() -> Iterator[Finding]:
    import imagecodecs
    import openslide

    jpeg = imagecodecs.jpeg8_version()
    yield _ok(
        "openslide",
        f"{openslide.__version__}, libopenslide {openslide.__library_version__}, "
        f"imagecodecs {imagecodecs.__version__} ({jpeg})",
    )


def _hdf5() -> Iterator[Finding]:
    import h5py

    yield _ok("hdf5", f"{h5py.version.hdf5_version}, h5py {h5py.__version__}")


def _torch() -> Iterator[Finding]:
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    yield _ok("torch", f"{torch.__version__} ({build})")


def _processor() -> Iterator[Finding]:
    import torch

    features = torch.backends.cpu.get_cpu_capability()
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    yield _ok(
        "processor",
        f"{cores} cores usable, {features}, {pages / 2**30:.0f} GiB of memory, "
        + ("a C++ compiler for `models compile`" if compiler else "no C++ compiler (not needed)"),
    )
    if features == "DEFAULT" and platform.machine() == "x86_64":
        yield Finding(
            name="processor",
            status="warning",
            fact="no AVX2: models will run several times slower",
            advice="use a newer node, or ask whether the virtual machine hides the feature",
        )


def _cuda() -> Iterator[Finding]:
    import torch

    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            facts = torch.cuda.get_device_properties(number)
            memory = facts.total_memory / 2**30
            yield _ok(
                f"cuda:{number}",
                f"{facts.name}, {memory:.0f} GiB, compute capability {facts.major}.{facts.minor}",
            )
    elif shutil.which("nvidia-smi"):
        yield Finding(
            name="cuda",
            status="warning",
            fact=f"an NVIDIA driver is here, and torch {torch.__version__} cannot use it",
            advice="install the CUDA build of torch that fits the driver (pytorch.org)",
        )
    else:
        yield _ok("cuda", "no device; models run on the CPU")


def _pictures() -> Iterator[Finding]:
    version = _installed("matplotlib")
    if version:
        yield _ok("pictures", f"matplotlib {version}")
    else:
        yield Finding(
            name="pictures",
            status="warning",
            fact="matplotlib is not installed; `bioptimus view` needs it, nothing else does",
            advice=f"pip install '{DISTRIBUTION}[view]'",
        )


def _reader() -> Iterator[Finding]:
    """Write a tiny slide, read it back by our own way and by OpenSlide's."""
    with tempfile.TemporaryDirectory(prefix="bioptimus-doctor-") as folder:
        path = Path(folder) / "tiny.tif"
        wanted = write_tiny_slide(path)
        yield read_tiny_slide(path, wanted)


def write_tiny_slide(path: Path) -> Any:
    """Write a tiled JPEG TIFF of 512 × 512 px at 0.5 µm/px.

    Returns:
        The picture that went in, (512, 512, 3) uint8.
    """
    import numpy as np
    import tifffile

    ramp = np.linspace(0, 255, 512).astype(np.uint8)
    pixels = np.stack(
        [
            np.broadcast_to(ramp, (512, 512)),
            np.broadcast_to(ramp[:, None], (512, 512)),
            np.full((512, 512), 160, np.uint8),
        ],
        axis=2,
    )
    tifffile.imwrite(
        path,
        pixels,
        tile=(256, 256),
        photometric="rgb",
        compression="jpeg",
        compressionargs={"level": 95},
        resolution=(20_000, 20_000),
        resolutionunit="CENTIMETER",
    )
    return pixels


def read_tiny_slide(path: Path, wanted: Any) -> Finding:
    """Read the tiny slide's tiles in both ways and compare with what went in."""
    import numpy as np

    from bioptimus.io.wsi import OpenOptions, Slide
    from bioptimus.tiles import TileSpec, plan_tiles

    grids: dict[str, Any] = {}
    scale = 0.0
    for reader in ("auto", "openslide"):
        with Slide.open(path, OpenOptions(reader=reader)) as slide:
            scale = slide.mpp[0]
            grid = plan_tiles(slide.dimensions, spec=TileSpec(size_px=256), mpp=slide.mpp)
            tiles = slide.tile_reader(grid.spec)
            grids[slide.reader] = [tiles.read(tile) for tile in grid]
    first = next(iter(grids.values()))
    whole = np.concatenate(
        [np.concatenate(first[:2], axis=1), np.concatenate(first[2:], axis=1)], axis=0
    )
    off = float(np.abs(whole.astype(int) - wanted).mean())
    same = all(
        np.array_equal(one, two)
        for tiles in grids.values()
        for one, two in zip(first, tiles, strict=True)
    )
    fact = f"tiny slide read by {' and '.join(grids)}: {scale:g} µm/px, "
    if same and off < 3 and abs(scale - 0.5) < 0.01:
        return _ok("reader", fact + "pixels right")
    return Finding(
        name="reader",
        status="problem",
        fact=fact + (f"pixels off by {off:.1f} grey levels" if same else "the readers disagree"),
        advice="reinstall openslide-bin and imagecodecs; until then use --reader openslide",
    )


def _folder(out: Path) -> Iterator[Finding]:
    """Write, fsync, rename and lock where results would go, and make a result file there."""
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".bioptimus-doctor-", dir=out) as folder:
            yield _write_and_rename(Path(folder), out)
            yield _locks(Path(folder))
            yield _result_file(Path(folder))
    except OSError as exc:
        yield Finding(
            name="output folder",
            status="problem",
            fact=f"{out}: {exc.strerror or exc}",
            advice="choose another --out, or ask for write permission and space there",
        )
        return
    finally:
        for parent in made:
            # Only what was made here, and only while it is empty.
            if parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()
    yield _space("free space", out if out.exists() else _existing(out))


def _write_and_rename(folder: Path, out: Path) -> Finding:
    part, final = folder / "file.h5.part", folder / "file.h5"
    start = time.perf_counter()
    with part.open("wb") as file:
        file.write(os.urandom(1 << 20))
        file.flush()
        os.fsync(file.fileno())
    part.rename(final)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if final.stat().st_size != 1 << 20 or part.exists():
        raise OutputError(f"{out}: a renamed file is not the one that was written")
    milliseconds = (time.perf_counter() - start) * 1000
    return _ok("output folder", f"{out}: write, fsync, rename in {milliseconds:.0f} ms")


def _locks(folder: Path) -> Finding:
    import fcntl

    path = folder / "lock"
    with path.open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            words = f"no file locks here ({exc.strerror}); result files are written without them"
        else:
            words = "work here (not needed for writing results)"
    # The claims of several jobs rest on this one, not on locks.
    claim = os.open(folder / "claim", os.O_CREAT | os.O_EXCL)
    os.close(claim)
    try:
        os.close(os.open(folder / "claim", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return _ok("file locks", words)
    return Finding(
        name="file locks",
        status="problem",
        fact="two programs can both create the same file here: claims would not hold",
        advice="run one job at a time on this file system, or choose another --out",
    )


def _result_file(folder: Path) -> Finding:
    """Write a result file as a run does, and look whether it is there afterwards."""
    import numpy as np

    from bioptimus.inference.writers import FilePlan, HDF5Writer, check_existing

    path, rows = folder / "slide.h5", np.arange(3)
    plan = FilePlan(
        coords=np.zeros((3, 2), np.int64),
        tissue_ratios=np.ones(3, np.float32),
        embedding_dim=4,
        digest="doctor",
    )
    writer = HDF5Writer.open(path, plan)
    try:
        writer.write_rows(rows, embeddings=np.ones((3, 4), np.float32), predictions=None)
        writer.finish(state="ok")
    finally:
        writer.close()
    if check_existing(path, digest="doctor", digest_parameters={}) != "same":
        raise OutputError(f"{folder.parent}: a result file is gone once it is finished")
    return _ok("result file", "written, finished and read back")


def _existing(folder: Path) -> Path:
    return next(parent for parent in (folder, *folder.resolve().parents) if parent.exists())


def _space(name: str, folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free
    fact = f"{free / 2**30:.1f} GiB in {folder}"
    if free < _NO_SPACE_BYTES:
        return Finding(name=name, status="problem", fact=fact, advice="free some space first")
    if free < _LOW_SPACE_BYTES:
        return Finding(
            name=name,
            status="warning",
            fact=fact,
            advice="100,000 tiles of 1,536 values need 0.6 GiB; `embed --dry-run` tells the sum",
        )
    return _ok(name, fact)


def _temporary_folder() -> Iterator[Finding]:
    folder = Path(tempfile.gettempdir())
    space = _space("temporary folder", folder)
    no_execution = getattr(os, "ST_NOEXEC", 0) & os.statvfs(folder).f_flag
    if no_execution and space.status == "ok":
        yield Finding(
            name="temporary folder",
            status="warning",
            fact=f"{folder} is mounted noexec: compiled models cannot be loaded from there",
            advice="set TMPDIR to a folder on another file system, or use portable .pt2 files",
        )
    else:
        yield space


def _cache_folder() -> Iterator[Finding]:
    from bioptimus.runtime.cache import cache_folder, limit_bytes, size_by_kind

    folder = cache_folder("doctor")
    with tempfile.NamedTemporaryFile(dir=folder):
        sizes = size_by_kind()
    folder.rmdir()
    parts = [f"{name} {_in_mb(size)}" for name, size in sizes.items() if size]
    fact = f"{folder.parent}, writable, {_in_mb(sum(sizes.values()))}"
    if parts:
        fact += f" ({', '.join(parts)})"
    yield _ok("cache folder", f"{fact}; pruned above {limit_bytes() / 1e9:g} GB")


def _in_mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.0f} MB"


def _open_files() -> Iterator[Finding]:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _WANTED_FILES:
        yield Finding(
            name="open files",
            status="warning",
            fact=f"a process may open {soft} files (hard limit {hard})",
            advice=f"ulimit -n {_WANTED_FILES} before a run with many workers",
        )
    else:
        yield _ok("open files", f"limit {soft}")


def _model() -> Iterator[Finding]:
    """Load the built-in model, made on first use, and run it on one tile."""
    import numpy as np

    from bioptimus.inference.schemas import ModelRequest
    from bioptimus.models.clients.local import InProcessClient
    from bioptimus.runtime.loader import build_server_model

    start = time.perf_counter()
    model = build_server_model("lite0", device="cpu")
    loaded = time.perf_counter() - start
    size = model.model_spec.tile.size_px
    ramp = np.linspace(0, 255, size).astype(np.uint8)
    tile = np.ascontiguousarray(np.broadcast_to(ramp[None, :, None], (size, size, 3)))
    with InProcessClient(model) as client:
        start = time.perf_counter()
        answer = client.embed(ModelRequest.from_pixels(tile, slide_name="doctor", x=0, y=0))
        ran = time.perf_counter() - start
    output = np.asarray(answer.output)
    if output.shape == (model.model_spec.embedding_dim,) and np.isfinite(output).all():
        yield _ok(
            "built-in model",
            f"lite0: loaded in {loaded:.1f} s, a tile in {ran * 1000:.0f} ms, {output.size} values",
        )
        return
    yield Finding(
        name="built-in model",
        status="problem",
        fact=f"lite0 gave {output.shape} values, some not finite or too few",
        advice="reinstall torch; then remove the cache folder and try again",
    )
