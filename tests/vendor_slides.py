"""Small slides laid out as OpenSlide's format pages describe those of scanners.

No scanner wrote these: they have what OpenSlide reads, and of the rest nothing. Each writer takes
the path to write and level 0 as RGB pixels, and returns the path.
"""

import base64
import contextlib
import io
import sqlite3
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tifffile
from PIL import Image

from tests.slides import half

Pixels = npt.NDArray[np.uint8]

# Colours of the pictures of a slide's label and of the whole glass: no tissue has them.
LABEL_COLOUR = (255, 255, 0)
MACRO_COLOUR = (0, 0, 255)


def jpeg(pixels: Pixels, *, restart_rows: bool = False) -> bytes:
    """A JPEG without loss of chroma resolution; with a restart marker after each row of blocks."""
    file = io.BytesIO()
    markers = {"restart_marker_rows": 1} if restart_rows else {}
    Image.fromarray(pixels).save(file, "JPEG", quality=90, subsampling=0, **markers)
    return file.getvalue()


def _plain(colour: tuple[int, int, int]) -> Pixels:
    return np.full((96, 160, 3), colour, np.uint8)


# ---- MIRAX ----

_MIRAX_ID = "0123456789ABCDEF0123456789ABCDEF"


class _DataFile:
    """Parts of a MIRAX slide, one after the other."""

    def __init__(self, number: int) -> None:
        self.name = f"Data{number:04}.dat"
        self.data = bytearray(b"01.02" + _MIRAX_ID.encode() + b"%03d" % number + bytes(256))
        self._number = number

    def add(self, part: bytes) -> tuple[int, int, int]:
        """(offset, length, file number) of what was added."""
        self.data += part
        return len(self.data) - len(part), len(part), self._number


def write_mirax(
    path: Path,
    pixels: Pixels,
    *,
    mpp: tuple[float, float] = (0.25, 0.25),
    photos: tuple[int, int] = (6, 5),
    overlap: tuple[int, int] = (17, 13),
    missing: Sequence[tuple[int, int]] = (),
    levels: int = 4,
    glass: tuple[int, int, int] = (255, 255, 255),
) -> Path:
    """A ``.mrxs`` file and its folder: overlapping photos of four images each.

    ``Data0000.dat`` has the images of level 0, ``Data0001.dat`` everything else.

    Args:
        path: Of the ``.mrxs`` file.
        pixels: What was photographed, counted from the corner of the grid of photos.
        mpp: (x, y) µm/px.
        photos: (across, down), each of 256 x 256 px.
        overlap: (x, y) px by which neighbours overlap. The stage is a few pixels off each time,
            as the stored positions tell.
        missing: (column, row) of photos that were not taken.
        levels: In the pyramid, each half of the one before.
        glass: (r, g, b) of what was not scanned.
    """
    side, finest, rest = 128, _DataFile(0), _DataFile(1)
    across, down = photos[0] * 2, photos[1] * 2
    jitter = np.random.default_rng(0).integers(-3, 4, (*photos, 2))
    images: dict[tuple[int, int], Pixels] = {}
    positions = b""
    for row in range(photos[1]):
        for column in range(photos[0]):
            taken = (column, row) not in missing
            x, y = (
                max(0, at * (256 - by) + int(off))
                for at, by, off in zip((column, row), overlap, jitter[column, row], strict=True)
            )
            positions += struct.pack("<Bii", taken, x, y)
            photo = np.full((256, 256, 3), 255, np.uint8)
            part = pixels[y : y + 256, x : x + 256]
            photo[: part.shape[0], : part.shape[1]] = part
            for i, j in ((0, 0), (1, 0), (0, 1), (1, 1)) if taken else ():
                image = photo[j * side : (j + 1) * side, i * side : (i + 1) * side]
                images[2 * column + i, 2 * row + j] = image
    hierarchy = []
    for level in range(levels):
        file = rest if level else finest
        hierarchy.append(
            [(y * across + x, *file.add(jpeg(image))) for (x, y), image in images.items()]
        )
        images = _four_to_one(images, 2**level)
    label, macro = jpeg(_plain(LABEL_COLOUR)), jpeg(_plain(MACRO_COLOUR))
    others = [rest.add(part) for part in (label, macro, zlib.compress(positions))]
    folder = path.with_suffix("")
    folder.mkdir()
    for file in (finest, rest):
        (folder / file.name).write_bytes(file.data)
    (folder / "Index.dat").write_bytes(_mirax_index(hierarchy, others))
    (folder / "Slidedat.ini").write_text(
        _mirax_ini(grid=(across, down), levels=levels, overlap=overlap, mpp=mpp, glass=glass)
    )
    path.write_bytes(macro)
    return path


def _four_to_one(images: dict[tuple[int, int], Pixels], step: int) -> dict[tuple[int, int], Pixels]:
    """Images of the next level: four neighbours beside each other, whatever they overlap."""
    joined: dict[tuple[int, int], Pixels] = {}
    for (x, y), image in images.items():
        corner = (x // (2 * step) * 2 * step, y // (2 * step) * 2 * step)
        whole = joined.setdefault(corner, np.full((128, 128, 3), 255, np.uint8))
        left, top = (x - corner[0]) // step * 64, (y - corner[1]) // step * 64
        whole[top : top + 64, left : left + 64] = half(image, 2)
    return joined


def _mirax_index(
    hierarchy: Sequence[Sequence[tuple[int, ...]]], others: Sequence[tuple[int, int, int]]
) -> bytes:
    """Pointers to lists, and lists of pages; the first page of a list is empty."""
    data = bytearray(b"01.02" + _MIRAX_ID.encode() + bytes(8))
    root = len(data) - 8

    def add(*numbers: int) -> int:
        data.extend(struct.pack(f"<{len(numbers)}i", *numbers))
        return len(data) - 4 * len(numbers)

    def pages(*entries: Sequence[int]) -> int:
        page = add(len(entries), 0, *(number for entry in entries for number in entry))
        return add(0, page)

    levels = add(*[pages(*entries) for entries in hierarchy])
    records = add(*[pages((0, 0, *entry)) for entry in others])
    data[root : root + 8] = struct.pack("<ii", levels, records)
    return bytes(data)


def _mirax_ini(
    *,
    grid: tuple[int, int],
    levels: int,
    overlap: tuple[int, int],
    mpp: tuple[float, float],
    glass: tuple[int, int, int],
) -> str:
    sections: dict[str, dict[str, object]] = {
        "GENERAL": {
            "SLIDE_VERSION": "01.02",
            "SLIDE_ID": _MIRAX_ID,
            "IMAGENUMBER_X": grid[0],
            "IMAGENUMBER_Y": grid[1],
            "CURRENT_SLIDE_VERSION": 2.2,
            "OBJECTIVE_MAGNIFICATION": 40,
            "CameraImageDivisionsPerSide": 2,
        },
        "HIERARCHICAL": {
            "INDEXFILE": "Index.dat",
            "HIER_COUNT": 1,
            "NONHIER_COUNT": 2,
            "HIER_0_NAME": "Slide zoom level",
            "HIER_0_COUNT": levels,
            **{f"HIER_0_VAL_{n}_SECTION": f"LAYER_0_LEVEL_{n}_SECTION" for n in range(levels)},
            "NONHIER_0_NAME": "Scan data layer",
            "NONHIER_0_COUNT": 2,
            "NONHIER_0_VAL_0": "ScanDataLayer_SlideBarcode",
            "NONHIER_0_VAL_0_SECTION": "NONHIERLAYER_0_LEVEL_0_SECTION",
            "NONHIER_0_VAL_1": "ScanDataLayer_SlideThumbnail",
            "NONHIER_0_VAL_1_SECTION": "NONHIERLAYER_0_LEVEL_1_SECTION",
            "NONHIER_1_NAME": "StitchingIntensityLayer",
            "NONHIER_1_COUNT": 1,
            "NONHIER_1_VAL_0": "StitchingIntensityLevel",
        },
        "DATAFILE": {"FILE_COUNT": 2, "FILE_0": "Data0000.dat", "FILE_1": "Data0001.dat"},
        "NONHIERLAYER_0_LEVEL_0_SECTION": {"BARCODE_IMAGE_TYPE": "JPEG"},
        "NONHIERLAYER_0_LEVEL_1_SECTION": {"THUMBNAIL_IMAGE_TYPE": "JPEG"},
    }
    for level in range(levels):
        by = 2**level
        sections[f"LAYER_0_LEVEL_{level}_SECTION"] = {
            "IMAGE_FILL_COLOR_BGR": int.from_bytes(glass, "little"),
            "MICROMETER_PER_PIXEL_X": mpp[0] * by,
            "MICROMETER_PER_PIXEL_Y": mpp[1] * by,
            "DIGITIZER_WIDTH": 128,
            "DIGITIZER_HEIGHT": 128,
            "OVERLAP_X": overlap[0] / by,
            "OVERLAP_Y": overlap[1] / by,
            "IMAGE_CONCAT_FACTOR": min(level, 1),
            "IMAGE_FORMAT": "JPEG",
        }
    return "".join(
        f"[{name}]\n" + "".join(f"{key} = {value}\n" for key, value in entries.items())
        for name, entries in sections.items()
    )


# ---- Hamamatsu NDPI ----


def write_ndpi(
    path: Path,
    pixels: Pixels,
    *,
    mpp: tuple[float, float] = (0.25, 0.25),
    lens: float = 40,
    factors: Sequence[int] = (1, 2, 8),
) -> Path:
    """Each level is one JPEG; only that of level 0 has restart markers, where reading can begin.

    Args:
        path: Where it is written.
        pixels: Level 0; width and height multiples of 8.
        mpp: (x, y) µm/px of level 0.
        lens: Power of the objective.
        factors: Whole downsample of each level, 1 first.
    """
    # The header's offset has 8 bytes here, unlike in any other TIFF.
    data, link = bytearray(b"II*\0" + bytes(8)), 4
    pages = [
        (half(pixels, by) if by > 1 else pixels, lens / by, (mpp[0] * by, mpp[1] * by))
        for by in factors
    ]
    for picture, power, scale in [*pages, (_plain(MACRO_COLOUR), -1.0, (50.0, 50.0))]:
        stream = jpeg(picture, restart_rows=power == lens)
        start = len(data)
        data += stream
        height, width = picture.shape[:2]
        tags: list[tuple[int, str, Sequence[float] | bytes]] = [
            (256, "I", [width]),
            (257, "I", [height]),
            (259, "H", [7]),
            (271, "s", b"Hamamatsu\0"),
            (273, "I", [start]),
            (278, "I", [height]),
            (279, "I", [len(stream)]),
            (282, "II", [10**7, round(scale[0] * 1000)]),
            (283, "II", [10**7, round(scale[1] * 1000)]),
            (296, "H", [3]),
            (65420, "I", [1]),
            (65421, "f", [power]),
            (65422, "i", [1000]),
            (65423, "i", [-1000]),
            (65424, "i", [0]),
        ]
        if power == lens:
            tags.append((65426, "I", list(_restarts(stream))))
        link = _add_ndpi_page(data, link, tags)
    path.write_bytes(data)
    return path


def _restarts(stream: bytes) -> Iterator[int]:
    """Where the data of each row of blocks begins in a JPEG."""
    scan = stream.index(b"\xff\xda")
    yield scan + 2 + int.from_bytes(stream[scan + 2 : scan + 4], "big")
    for at in range(scan, len(stream) - 1):
        if stream[at] == 0xFF and 0xD0 <= stream[at + 1] <= 0xD7:
            yield at + 2


_NDPI_TYPES = {"s": (2, 1), "H": (3, 2), "I": (4, 4), "II": (5, 8), "i": (9, 4), "f": (11, 4)}


def _add_ndpi_page(
    data: bytearray, link: int, tags: Iterable[tuple[int, str, Sequence[float] | bytes]]
) -> int:
    """Append a page table, write its place at ``link`` and return the place of its own link."""
    entries = b""
    for tag, kind, values in tags:
        number, size = _NDPI_TYPES[kind]
        if isinstance(values, bytes):
            raw = values
        else:
            raw = struct.pack(f"<{len(values)}{kind[0]}", *values)
        # Text is never kept in the table itself, however short.
        if len(raw) > 4 or kind == "s":
            place = struct.pack("<I", len(data))
            data += raw
        else:
            place = raw.ljust(4, b"\0")
        entries += struct.pack("<HHI", tag, number, len(raw) // size) + place
    data += bytes(len(data) % 2)
    data[link : link + 8] = struct.pack("<Q", len(data))
    count = len(entries) // 12
    data += struct.pack("<H", count) + entries
    # The next page's offset, then the high half of every value.
    data += bytes(8 + 4 * count)
    return len(data) - 8 - 4 * count


# ---- Hamamatsu VMS ----


def write_vms(path: Path, pixels: Pixels, *, mpp: tuple[float, float] = (0.25, 0.25)) -> Path:
    """A text that names files beside it: level 0 in two JPEGs side by side, and a map of both.

    Args:
        path: Of the text.
        pixels: Level 0; width a multiple of 32, height of 16.
        mpp: (x, y) µm/px.
    """
    height, width = pixels.shape[:2]
    pictures = {
        "ImageFile": pixels[:, : width // 2],
        "ImageFile(1,0)": pixels[:, width // 2 :],
        "MapFile": half(pixels, 16),
        "MacroImage": _plain(MACRO_COLOUR),
    }
    text = (
        "[Virtual Microscope Specimen]\nNoLayers=1\nNoJpegColumns=2\nNoJpegRows=1\nSourceLens=40\n"
        f"PhysicalWidth={width * mpp[0] * 1000:.0f}\nPhysicalHeight={height * mpp[1] * 1000:.0f}\n"
    )
    for number, (key, picture) in enumerate(pictures.items()):
        file = path.with_name(f"{path.stem}-{number}.jpg")
        file.write_bytes(jpeg(picture, restart_rows=True))
        text += f"{key}={file.name}\n"
    path.write_text(text)
    return path


# ---- Philips TIFF ----


def write_philips(
    path: Path,
    pixels: Pixels,
    *,
    mpp: tuple[float, float] = (0.25, 0.25),
    factors: Sequence[int] = (1, 2, 4, 8),
    tile: int = 256,
    missing: Sequence[tuple[int, int]] = (),
) -> Path:
    """Tiled JPEG whose levels are padded to whole tiles; only the description tells their scale.

    Args:
        path: Where it is written.
        pixels: Level 0.
        mpp: (x, y) µm/px of level 0.
        factors: Whole downsample of each level, 1 first.
        tile: Side of the stored tiles.
        missing: (column, row) of tiles of level 0 without data; coarser ones show white there.
    """
    pixels = _padded(pixels, tile)
    for column, row in missing:
        pixels[row * tile : (row + 1) * tile, column * tile : (column + 1) * tile] = 255
    with tifffile.TiffWriter(path, bigtiff=True) as writer:
        for factor in factors:
            level = pixels if factor == 1 else _padded(half(pixels, factor), tile)
            gone = missing if factor == 1 else ()
            _write_jpeg(
                writer,
                _jpeg_tiles(level, tile, gone),
                level.shape,
                tile,
                subfiletype=int(factor > 1),
                software="Philips DP v1.0" if factor == 1 else False,
                description=_philips_xml(mpp, factors) if factor == 1 else None,
            )
    return path


def _padded(pixels: Pixels, tile: int, value: int = 255) -> Pixels:
    beyond = ((0, -pixels.shape[0] % tile), (0, -pixels.shape[1] % tile), (0, 0))
    return np.pad(pixels, beyond, constant_values=value)


def _jpeg_tiles(
    pixels: Pixels, tile: int, missing: Sequence[tuple[int, int]] = ()
) -> Iterator[bytes]:
    for row in range(pixels.shape[0] // tile):
        for column in range(pixels.shape[1] // tile):
            part = pixels[row * tile : (row + 1) * tile, column * tile : (column + 1) * tile]
            yield b"" if (column, row) in missing else jpeg(part)


def _write_jpeg(
    writer: tifffile.TiffWriter,
    tiles: Iterator[bytes],
    shape: tuple[int, ...],
    tile: int,
    **tags: Any,
) -> None:
    """A level of such tiles, and tags of its own."""
    writer.write(
        tiles,
        shape=shape,
        dtype=np.uint8,
        tile=(tile, tile),
        photometric="ycbcr",
        compression="jpeg",
        subsampling=(1, 1),
        metadata=None,
        **tags,
    )


def _philips_xml(mpp: tuple[float, float], factors: Sequence[int]) -> str:
    def field(name: str, value: str) -> str:
        return f'<Attribute Name="{name}">{value}</Attribute>'

    def entry(kind: str, *fields: str) -> str:
        return f'<DataObject ObjectType="{kind}">{"".join(fields)}</DataObject>'

    def spacing(factor: int) -> str:
        # Rows come first.
        numbers = (f"&quot;{by * factor / 1000:.8f}&quot;" for by in reversed(mpp))
        return field("DICOM_PIXEL_SPACING", " ".join(numbers))

    levels = "".join(entry("PixelDataRepresentation", spacing(factor)) for factor in factors)
    images = [
        entry(
            "DPScannedImage",
            field("PIM_DP_IMAGE_TYPE", "WSI"),
            spacing(1),
            field("PIIM_PIXEL_DATA_REPRESENTATION_SEQUENCE", f"<Array>{levels}</Array>"),
        )
    ]
    for kind, colour in (("LABELIMAGE", LABEL_COLOUR), ("MACROIMAGE", MACRO_COLOUR)):
        picture = base64.b64encode(jpeg(_plain(colour))).decode()
        images.append(
            entry(
                "DPScannedImage",
                field("PIM_DP_IMAGE_TYPE", kind),
                field("PIM_DP_IMAGE_DATA", picture),
            )
        )
    return entry(
        "DPUfsImport",
        field("DICOM_MANUFACTURER", "PHILIPS"),
        field("PIM_DP_SCANNED_IMAGES", f"<Array>{''.join(images)}</Array>"),
    )


def _overlapping(
    pixels: Pixels, grid: tuple[int, int], overlap: tuple[int, int], tile: int
) -> Pixels:
    """Tiles that overlap in the slide, side by side."""
    mosaic = np.full((grid[1] * tile, grid[0] * tile, 3), 255, np.uint8)
    for row in range(grid[1]):
        for column in range(grid[0]):
            x, y = column * (tile - overlap[0]), row * (tile - overlap[1])
            part = pixels[y : y + tile, x : x + tile]
            top, left = row * tile, column * tile
            mosaic[top : top + part.shape[0], left : left + part.shape[1]] = part
    return mosaic


# ---- Trestle ----


def write_trestle(
    path: Path, pixels: Pixels, *, mpp: float = 0.25, overlaps: Sequence[int] = (16, 8, 4)
) -> Path:
    """Tiles that overlap, at each level by another number of pixels; half the size each.

    Args:
        path: Where it is written.
        pixels: Level 0.
        mpp: µm/px, which stand in the tags that elsewhere have pixels per unit.
        overlaps: Pixels by which the tiles of each level overlap, along both axes.
    """
    fields = ";".join(
        [
            "Background Color=E6E6E6",
            "White Balance=CCCCCC",
            "Objective Power=40",
            "OverlapsXY= " + " ".join(f"{by} {by}" for by in overlaps),
        ]
    )
    with tifffile.TiffWriter(path) as writer:
        for number, by in enumerate(overlaps):
            level = pixels if number == 0 else half(pixels, 2**number)
            height, width = level.shape[:2]
            across, down = (-(-(length - by) // (256 - by)) for length in (width, height))
            mosaic = _overlapping(level, (across, down), (by, by), 256)
            _write_jpeg(
                writer,
                _jpeg_tiles(mosaic, 256),
                (height + (down - 1) * by, width + (across - 1) * by, 3),
                256,
                software="MedScan" if number == 0 else False,
                description=fields if number == 0 else None,
                resolution=(mpp, mpp),
            )
    return path


# ---- Ventana BIF ----


def write_ventana(
    path: Path,
    pixels: Pixels,
    *,
    mpp: float = 0.25,
    grid: tuple[int, int] = (6, 5),
    overlap: tuple[int, int] = (9, 6),
    factors: Sequence[int] = (1, 2, 4),
    tile: int = 256,
    joints: bool = True,
) -> Path:
    """One scanned area of overlapping tiles; the coarser levels are made with the overlaps in.

    Args:
        path: Where it is written.
        pixels: What was scanned, from the first tile's corner.
        mpp: µm/px.
        grid: (across, down) tiles.
        overlap: (x, y) px by which neighbours overlap.
        factors: Whole downsample of each level, 1 first.
        tile: Side of the stored tiles.
    """
    mosaic = _overlapping(pixels, grid, overlap, tile)
    scanner = f'<iScan Magnification="40" ScanRes="{mpp:g}" Z-layers="1"/>'
    with tifffile.TiffWriter(path, bigtiff=True) as writer:
        writer.write(
            _plain(MACRO_COLOUR),
            photometric="rgb",
            description="Label_Image",
            metadata=None,
            extratags=[_xmp(f"<Metadata>{scanner}</Metadata>")],
        )
        for number, factor in enumerate(factors):
            level = mosaic if factor == 1 else _padded(half(mosaic, factor), tile)
            told = _ventana_joints(grid, overlap, tile)
            _write_jpeg(
                writer,
                _jpeg_tiles(level, tile),
                level.shape,
                tile,
                description=f"level={number} mag={40 / factor:g} quality=90",
                extratags=[_xmp(told)] if factor == 1 and joints else [],
            )
    return path


def _xmp(text: str) -> tuple[int, int, int, bytes, bool]:
    return (700, 1, len(text) + 1, text.encode() + b"\0", True)


def _ventana_joints(grid: tuple[int, int], overlap: tuple[int, int], tile: int) -> str:
    across, down = grid

    def number(column: int, row: int) -> int:
        """Counted from 1 at the lower left, every second row from the right."""
        up = down - 1 - row
        return up * across + (column if up % 2 == 0 else across - 1 - column) + 1

    def joint(direction: str, first: int, second: int, x: int, y: int) -> str:
        return (
            f'<TileJointInfo Direction="{direction}" Tile1="{first}" Tile2="{second}" '
            f'OverlapX="{x}" OverlapY="{y}" Confidence="100" FlagJoined="1"/>'
        )

    joints = [
        joint("RIGHT", number(column, row), number(column + 1, row), overlap[0], 0)
        for row in range(down)
        for column in range(across - 1)
    ] + [
        joint("UP", number(column, row), number(column, row - 1), 0, overlap[1])
        for row in range(1, down)
        for column in range(across)
    ]
    return (
        '<EncodeInfo Ver="2"><SlideStitchInfo>'
        f'<ImageInfo AOIScanned="1" AOIIndex="0" Width="{tile}" Height="{tile}" '
        f'NumRows="{down}" NumCols="{across}" Pos-X="0" Pos-Y="0">{"".join(joints)}</ImageInfo>'
        '</SlideStitchInfo><AoiOrigin><AOI0 OriginX="0" OriginY="0"/></AoiOrigin></EncodeInfo>'
    )


# ---- Sakura ----


def write_sakura(
    path: Path,
    pixels: Pixels,
    *,
    mpp: float = 0.25,
    factors: Sequence[int] = (1, 2, 4),
    missing: Sequence[tuple[int, int]] = (),
) -> Path:
    """A SQLite database; each colour of a tile is a grey JPEG under a name that tells its place.

    Args:
        path: Where it is written; no file may be there.
        pixels: Level 0.
        mpp: µm/px.
        factors: Powers of two, 1 first: the downsample of each level.
        missing: (column, row) of tiles of level 0 that are left out.
    """
    tile, (height, width) = 256, pixels.shape[:2]
    parts: dict[str, bytes] = {
        "++MagicBytes": b"SVGigaPixelImage",
        "++VersionBytes": b"1.0.0",
        "Header": struct.pack("<6I", tile, width, height, 8, 1, 3),
    }
    for factor in factors:
        level = _padded(pixels if factor == 1 else half(pixels, factor), tile)
        for row in range(level.shape[0] // tile):
            for column in range(level.shape[1] // tile):
                if factor == 1 and (column, row) in missing:
                    continue
                part = level[row * tile : (row + 1) * tile, column * tile : (column + 1) * tile]
                x, y = column * tile * factor, row * tile * factor
                for colour in range(3):
                    name = f"T;{x}|{y};{factor};{colour};0"
                    parts[name] = jpeg(np.ascontiguousarray(part[..., colour]))
    pictures = [(1, jpeg(_plain(LABEL_COLOUR))), (2, jpeg(_plain(MACRO_COLOUR)))]
    with contextlib.closing(sqlite3.connect(path)) as data, data:
        data.executescript(
            """
            CREATE TABLE DataManagerSQLiteConfigXPO (TableName TEXT);
            CREATE TABLE Scan (id TEXT PRIMARY KEY, size INTEGER, data BLOB);
            CREATE TABLE SVSlideDataXPO (OID INTEGER PRIMARY KEY, m_labelScan INTEGER,
                m_overviewScan INTEGER, SlideId TEXT, Date TEXT, Description TEXT, Creator TEXT,
                DiagnosisCode TEXT, Keywords TEXT);
            CREATE TABLE SVHRScanDataXPO (OID INTEGER PRIMARY KEY, ParentSlide INTEGER,
                ScanId TEXT, Date TEXT, Description TEXT, Name TEXT, ResolutionMmPerPix REAL,
                NominalLensMagnification REAL, ThumbnailImage BLOB, FocussingMethod INTEGER);
            CREATE TABLE SVScannedImageDataXPO (OID INTEGER PRIMARY KEY, Image BLOB);
            INSERT INTO DataManagerSQLiteConfigXPO VALUES ('Scan');
            INSERT INTO SVSlideDataXPO VALUES (1, 1, 2, 'slide', '', '', '', '0', '');
            """
        )
        data.execute(
            "INSERT INTO SVHRScanDataXPO VALUES (1, 1, 'scan', '', '', '', ?, 40, NULL, 1)",
            (mpp / 1000,),
        )
        data.executemany("INSERT INTO SVScannedImageDataXPO VALUES (?, ?)", pictures)
        data.executemany(
            "INSERT INTO Scan VALUES (?, ?, ?)",
            [(name, len(part), part) for name, part in parts.items()],
        )
    return path
