"""Small slides written for tests: pyramids, Aperio look-alikes, damaged and transparent ones.

Every writer takes the path to write and returns it. Pixels come from the real example slide or
from a seeded generator, so a test can compare what it reads with what it wrote.
"""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import numpy.typing as npt
import openslide
import pytest
import tifffile

from tests.conftest import EXAMPLE_SLIDE

Pixels = npt.NDArray[np.uint8]


@lru_cache(maxsize=1)
def _example_pixels() -> Pixels:
    with openslide.OpenSlide(EXAMPLE_SLIDE) as slide:
        image = slide.read_region((0, 0), 0, slide.dimensions).convert("RGB")
    return np.asarray(image)


def tissue(width: int, height: int) -> Pixels:
    """(height, width, 3) of real H&E: the example slide's tissue, mirrored where it ends."""
    source = _example_pixels()[1100:2900, 300:2100]
    rows = (height + len(source) - 1) // len(source)
    columns = (width + source.shape[1] - 1) // source.shape[1]
    row_parts = [source[:: -1 if row % 2 else 1] for row in range(rows)]
    tall = np.concatenate(row_parts)[:height]
    parts = [tall[:, :: -1 if column % 2 else 1] for column in range(columns)]
    return np.ascontiguousarray(np.concatenate(parts, axis=1)[:, :width])


def noise(width: int, height: int, seed: int = 0) -> Pixels:
    """(height, width, 3) in which no two places look alike."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def white(width: int, height: int) -> Pixels:
    """An empty slide: (height, width, 3) of 244, as glass looks."""
    return np.full((height, width, 3), 244, np.uint8)


def ramp(width: int, height: int) -> Pixels:
    """(height, width, 3): red rises along x, green along y, both from 0 to 255."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[..., 0] = np.round(np.linspace(0, 255, width))[None, :]
    pixels[..., 1] = np.round(np.linspace(0, 255, height))[:, None]
    return pixels


def half(pixels: Pixels, factor: int) -> Pixels:
    """Area average by a whole factor; rows and columns that do not fill one are dropped."""
    height, width = (length // factor for length in pixels.shape[:2])
    cut = pixels[: height * factor, : width * factor]
    parts = cut.reshape(height, factor, width, factor, -1).astype(np.float64)
    return np.ascontiguousarray(np.round(parts.mean(axis=(1, 3))).astype(np.uint8))


def write_pyramid(
    path: Path,
    pixels: Pixels,
    *,
    mpp: float | tuple[float, float] | None = 0.25,
    factors: Sequence[int] = (1, 4, 16),
    tile: int | None = 256,
    compression: str | None = "deflate",
    unit: str = "CENTIMETER",
    description: str | None = None,
    bigtiff: bool = False,
    subifds: bool = False,
    **options: Any,
) -> Path:
    """A pyramidal TIFF.

    Args:
        path: Where it is written; the suffix decides nothing.
        pixels: Level 0.
        mpp: µm/px in the resolution tags, one number or (x, y); None writes no unit.
        factors: Whole downsample of each level, 1 first.
        tile: Side of the stored tiles; None writes strips.
        compression: As tifffile names it: ``jpeg``, ``deflate``, ``lzw``, None ...
        unit: Unit of the resolution tags: ``CENTIMETER``, ``INCH``, ``NONE``.
        description: ImageDescription of level 0.
        bigtiff: 64-bit offsets.
        subifds: Put the coarser levels below level 0, where OME-TIFF has them.
        options: Handed to ``TiffWriter.write``: ``subsampling``, ``iccprofile``, ``extratags`` ...
    """
    um = {"CENTIMETER": 10000.0, "INCH": 25400.0, "NONE": 1.0}[unit]
    x, y = mpp if isinstance(mpp, tuple) else (mpp, mpp)
    resolution = (1.0, 1.0) if x is None or y is None else (um / x, um / y)
    shared: dict[str, Any] = {
        "tile": None if tile is None else (tile, tile),
        "compression": compression,
        "photometric": "rgb",
        "metadata": None,
        **options,
    }
    with tifffile.TiffWriter(path, bigtiff=bigtiff) as writer:
        for number, factor in enumerate(factors):
            extra: dict[str, Any] = {}
            if number == 0:
                extra["description"] = description
                extra["subifds"] = len(factors) - 1 if subifds else None
            else:
                extra["subfiletype"] = 1
            level = pixels if factor == 1 else half(pixels, factor)
            writer.write(
                level,
                resolution=resolution,
                resolutionunit="NONE" if mpp is None else unit,
                **extra,
                **shared,
            )
    return path


def write_svs(
    path: Path,
    pixels: Pixels,
    *,
    mpp: float | None = 0.25,
    power: float | None = 40,
    factors: Sequence[int] = (1, 4, 16),
    tile: int = 256,
    quality: int = 90,
    subsampling: tuple[int, int] = (2, 2),
) -> Path:
    """A slide that OpenSlide takes for an Aperio SVS: tiled JPEG and Aperio's descriptions.

    Args:
        path: Where it is written.
        pixels: Level 0.
        mpp: Value of ``MPP`` in the description; None leaves it out.
        power: Value of ``AppMag``; None leaves it out.
        factors: Whole downsample of each level, 1 first.
        tile: Side of the stored tiles.
        quality: JPEG quality.
        subsampling: JPEG chroma subsampling.
    """
    height, width = pixels.shape[:2]
    fields = ""
    if power is not None:
        fields += f"|AppMag = {power:g}"
    if mpp is not None:
        fields += f"|MPP = {mpp:.4f}"
    with tifffile.TiffWriter(path) as writer:
        for factor in factors:
            level = pixels if factor == 1 else half(pixels, factor)
            size = f"{width}x{height} [0,0 {width}x{height}] ({tile}x{tile})"
            if factor != 1:
                size += f" -> {level.shape[1]}x{level.shape[0]}"
            writer.write(
                level,
                tile=(tile, tile),
                photometric="rgb",
                compression="jpeg",
                compressionargs={"level": quality},
                subsampling=subsampling,
                description=f"Aperio Image Library v11.2.1\r\n{size} JPEG/RGB Q={quality}"
                + (fields if factor == 1 else ""),
                metadata=None,
            )
    return path


def tile_place(path: Path, *, level: int = 0, index: int = 0) -> tuple[int, int]:
    """(offset, length) in bytes of one stored tile; levels counted over the file's tiled pages."""
    with tifffile.TiffFile(path) as tiff:
        page = _tiled_pages(tiff)[level]
        return int(page.dataoffsets[index]), int(page.databytecounts[index])


def _tiled_pages(tiff: tifffile.TiffFile) -> list[tifffile.TiffPage]:
    return [page for page in tiff.pages if isinstance(page, tifffile.TiffPage) and page.is_tiled]


def damage_tile(path: Path, *, level: int = 0, index: int = 0) -> Path:
    """Overwrite one stored tile with zeros, so that it cannot be decoded."""
    offset, length = tile_place(path, level=level, index=index)
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(bytes(length))
    return path


def damage_level(path: Path, *, level: int) -> Path:
    """Overwrite every stored tile of a level with zeros."""
    with tifffile.TiffFile(path) as tiff:
        count = len(_tiled_pages(tiff)[level].dataoffsets)
    for index in range(count):
        damage_tile(path, level=level, index=index)
    return path


def truncate(path: Path, *, share: float = 0.5) -> Path:
    """Cut a file off."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(int(size * share))
    return path


def decode_one_grey_level_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on one value of each stored JPEG tile that the fast reader decodes is wrong."""
    real = imagecodecs.jpeg8_decode

    def one_grey_level_off(*args: Any, **options: Any) -> Pixels:
        pixels: Pixels = real(*args, **options)
        pixels[100, 100] ^= 1
        return pixels

    monkeypatch.setattr(imagecodecs, "jpeg8_decode", one_grey_level_off)
