"""Big synthetic slides of real tissue, built once into a folder and used by every benchmark.

A has a level at 0.5 µm/px, so 224 px tiles need no scaling; B has not (448 -> 224); C is B as RGB
JPEG without colour marker, as Aperio writes it; J is a small slide in JPEG 2000.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import numpy.typing as npt
import openslide
import tifffile
from PIL import Image

Pixels = npt.NDArray[np.uint8]

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "CMU-1-Small-Region.svs"
SHARED = ROOT.parent / "shared" / "slides"
TILE = 256
MPP = 0.25


@dataclass(frozen=True, kw_only=True)
class Kind:
    """How one big slide is stored.

    Attributes:
        size: (width, height) of level 0.
        factors: Downsample of each level.
        codec: ``ycbcr`` (JPEG 4:2:0), ``rgb`` (JPEG 4:4:4, no marker) or ``jpeg2000``.
        quality: JPEG quality, or JPEG 2000 signal-to-noise ratio.
    """

    size: tuple[int, int] = (24576, 20480)
    factors: tuple[int, ...]
    codec: str
    quality: int


KINDS = {
    "A": Kind(factors=(1, 2, 4, 16), codec="ycbcr", quality=90),
    "B": Kind(factors=(1, 4, 16), codec="ycbcr", quality=90),
    "C": Kind(factors=(1, 4, 16), codec="rgb", quality=70),
    "J": Kind(size=(8192, 4096), factors=(1, 4), codec="jpeg2000", quality=40),
}


def cache_folder() -> Path:
    """Where big slides are kept: ``BIOPTIMUS_BENCH_CACHE``, else below the user's cache."""
    named = os.environ.get("BIOPTIMUS_BENCH_CACHE")
    folder = Path(named) if named else Path.home() / ".cache" / "bioptimus" / "benchmarks"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def big_slide(name: str) -> Path:
    """Path of a big slide; built when it is not there (A, B and C take about 20 s each)."""
    kind = KINDS[name]
    path = cache_folder() / f"{name}-{kind.size[0]}x{kind.size[1]}.svs"
    if not path.exists():
        part = path.with_suffix(".part")
        _write(part, kind)
        part.replace(path)
    return path


# ---- pixels ----


def tissue_sources() -> tuple[list[Pixels], Pixels]:
    """(pictures of tissue, a picture of glass): shared slides where present, else the example."""
    with openslide.OpenSlide(EXAMPLE) as slide:
        whole = np.asarray(slide.read_region((0, 0), 0, slide.dimensions).convert("RGB"))
    pictures = [whole[1200:, 700:1500]]
    patches = SHARED / "he-patches"
    if patches.is_dir():
        names = [path for path in sorted(patches.glob("*.png")) if "no-tissue" not in path.name]
        pictures += [np.asarray(Image.open(path).convert("RGB")) for path in names]
    return [entry for entry in pictures if min(entry.shape[:2]) >= 500], whole[100:600, 100:600]


def mosaic(width: int, height: int, *, seed: int = 7, block: int = 500) -> Pixels:
    """(height, width, 3): an ellipse of turned pieces of tissue on glass."""
    rng = np.random.default_rng(seed)
    pictures, glass = tissue_sources()
    out = np.empty((height, width, 3), np.uint8)
    for y in range(0, height, block):
        for x in range(0, width, block):
            from_centre = ((y + block / 2) / height - 0.5) ** 2 / 0.46**2
            from_centre += ((x + block / 2) / width - 0.5) ** 2 / 0.47**2
            source = pictures[rng.integers(len(pictures))] if from_centre < 1 else glass
            top = rng.integers(source.shape[0] - block + 1)
            left = rng.integers(source.shape[1] - block + 1)
            piece = np.rot90(source[top : top + block, left : left + block], int(rng.integers(4)))
            rows, columns = min(block, height - y), min(block, width - x)
            out[y : y + rows, x : x + columns] = piece[:rows, :columns]
    return out


def halved(pixels: Pixels) -> Pixels:
    """Mean of each 2 x 2."""
    wide = pixels.astype(np.uint16)
    total = wide[0::2, 0::2] + wide[1::2, 0::2] + wide[0::2, 1::2] + wide[1::2, 1::2]
    mean: Pixels = ((total + 2) >> 2).astype(np.uint8)
    return mean


# ---- files ----


def _write(path: Path, kind: Kind) -> None:
    width, height = kind.size
    level, factor = mosaic(width, height), 1
    with tifffile.TiffWriter(path) as writer:
        for wanted in kind.factors:
            while factor < wanted:
                level, factor = halved(level), factor * 2
            writer.write(
                iter(_tiles(level, kind)),
                shape=level.shape,
                dtype=level.dtype,
                tile=(TILE, TILE),
                photometric="rgb",
                description=_description(kind, level, is_first=wanted == 1),
                metadata=None,
                **_storage(kind, level),
            )


def _description(kind: Kind, level: Pixels, *, is_first: bool) -> str:
    size = f"{kind.size[0]}x{kind.size[1]}"
    text = f"Aperio Image Library v11.2.1\r\n{size} [0,0 {size}] ({TILE}x{TILE}) "
    if is_first:
        return f"{text}JPEG/RGB Q={kind.quality}|AppMag = 40|MPP = {MPP:.4f}"
    return f"{text}-> {level.shape[1]}x{level.shape[0]} JPEG/RGB Q={kind.quality}"


def _storage(kind: Kind, level: Pixels) -> dict[str, Any]:
    if kind.codec == "jpeg2000":
        return {"compression": 33005}
    tables = _split(_encoded(level[:TILE, :TILE], kind), kind)[0]
    return {
        "compression": "jpeg",
        "jpegtables": tables,
        "subsampling": (1, 1) if kind.codec == "rgb" else (2, 2),
        "compressionargs": {"outcolorspace": 2 if kind.codec == "rgb" else 6},
    }


def _tiles(level: Pixels, kind: Kind) -> Iterator[bytes]:
    for y in range(0, level.shape[0], TILE):
        for x in range(0, level.shape[1], TILE):
            coded = _encoded(level[y : y + TILE, x : x + TILE], kind)
            yield coded if kind.codec == "jpeg2000" else _split(coded, kind)[1]


def _encoded(tile: Pixels, kind: Kind) -> bytes:
    tile = np.ascontiguousarray(tile)
    if kind.codec == "jpeg2000":
        return bytes(
            imagecodecs.jpeg2k_encode(tile, level=kind.quality, codecformat="j2k", mct=True)
        )
    is_rgb = kind.codec == "rgb"
    return bytes(
        imagecodecs.jpeg8_encode(
            tile,
            level=kind.quality,
            colorspace="RGB",
            outcolorspace="RGB" if is_rgb else "YCBCR",
            subsampling="444" if is_rgb else "420",
        )
    )


def _split(stream: bytes, kind: Kind) -> tuple[bytes, bytes]:
    """(JPEGTables, abbreviated stream), as scanners store them: no markers that name colours."""
    tables, rest, at = bytearray(), bytearray(), 2
    while True:
        marker = stream[at + 1]
        length = int.from_bytes(stream[at + 2 : at + 4], "big")
        segment = bytearray(stream[at : at + 2 + length])
        at += 2 + length
        if kind.codec == "rgb":
            _renumber(segment, marker)
        if marker in (0xDB, 0xC4):
            tables += segment
        elif marker not in (0xE0, 0xEE):
            rest += segment
        if marker == 0xDA:
            return _jpeg(tables) + b"\xff\xd9", _jpeg(rest) + stream[at:]


def _renumber(segment: bytearray, marker: int) -> None:
    """Components 0, 1, 2 instead of 'R', 'G', 'B', which decoders would recognise."""
    places: Sequence[int] = {0xC0: (10, 13, 16), 0xDA: (5, 7, 9)}.get(marker, ())
    for number, place in enumerate(places):
        segment[place] = number


def _jpeg(content: bytearray) -> bytes:
    return b"\xff\xd8" + bytes(content)
