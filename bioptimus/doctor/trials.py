"""A run in small: read a tiny slide, write a result file, ask the built-in model."""

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bioptimus.doctor.finding import Finding, ok
from bioptimus.doctor.machine import free_space
from bioptimus.errors import OutputError


def reader() -> Iterator[Finding]:
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
        return ok("reader", fact + "pixels right")
    return Finding(
        name="reader",
        status="problem",
        fact=fact + (f"pixels off by {off:.1f} grey levels" if same else "the readers disagree"),
        advice="reinstall openslide-bin and imagecodecs; until then use --reader openslide",
    )


def output_folder(out: Path) -> Iterator[Finding]:
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
    yield free_space("free space", out if out.exists() else _existing(out))


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
    return ok("output folder", f"{out}: write, fsync, rename in {milliseconds:.0f} ms")


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
        return ok("file locks", words)
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
    if check_existing(path, digest="doctor", digest_parameters={}) is None:
        raise OutputError(f"{folder.parent}: a result file is gone once it is finished")
    return ok("result file", "written, finished and read back")


def _existing(folder: Path) -> Path:
    return next(parent for parent in (folder, *folder.resolve().parents) if parent.exists())


def built_in_model() -> Iterator[Finding]:
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
        yield ok(
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
