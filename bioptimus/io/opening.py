"""From a path to a source of pixels: which reader opens the file, and what it says about it."""

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import openslide
import tifffile
from openslide import lowlevel

from bioptimus.io.crew import ALONE, Crew
from bioptimus.io.judge import first_difference
from bioptimus.io.metadata import Metadata
from bioptimus.io.plain import cut_off_sentence, open_plain, sub_levels
from bioptimus.io.quiet import quiet_tifffile
from bioptimus.io.refusals import check_companions, check_readable, check_whole, explain
from bioptimus.io.sources import OpenSlideSource, PixelSource
from bioptimus.io.stored import StoredLevel, UnsupportedLayoutError, stored_level
from bioptimus.io.tiff import TiffSource

log = logging.getLogger(__name__)

# Formats whose stored tiles overlap or are moved about: a table of tiles does not tell where
# their pixels belong.
_MOVED_TILES = ("ventana", "trestle", "zeiss", "mirax", "dicom", "hamamatsu", "sakura")
# What tifffile raises for a file that it cannot make out.
_NO_TABLE = (tifffile.TiffFileError, OSError, ValueError, KeyError, IndexError)


def open_source(
    path: Path, *, fast: bool, crew: Crew = ALONE, to_read: bool = True
) -> tuple[Metadata, PixelSource]:
    """Open a slide with the reader that suits it.

    Args:
        path: The slide's file.
        fast: Whether readers other than OpenSlide may be used.
        crew: Who compares their pixels with OpenSlide's.
        to_read: Whether they are tried where OpenSlide opens the file too.

    Raises:
        SlideOpenError: No reader can open it.
    """
    refused: openslide.OpenSlideError | None = None
    try:
        check_readable(path)
        handle = openslide.OpenSlide(path)
        metadata = _metadata(handle)
        downsamples = handle.level_downsamples
    except openslide.OpenSlideError as exc:
        refused = exc
    if refused is not None:
        return _open_refused(path, refused, fast=fast)
    check_companions(path, metadata.properties)
    if metadata.vendor == "philips":
        metadata = replace(metadata, stored=_stored_tiles(path))
    judge = OpenSlideSource(path, handle, metadata.background)
    if not (fast and to_read):
        return metadata, judge
    with quiet_tifffile(path.name):
        return _faster_source(path, metadata, downsamples, judge, crew) or (metadata, judge)


def _open_refused(
    path: Path, refused: openslide.OpenSlideError, *, fast: bool
) -> tuple[Metadata, PixelSource]:
    """Open what OpenSlide refused, or say why nobody can."""
    vendor = openslide.OpenSlide.detect_format(path)
    reason = "no other reader was tried, because of --reader openslide"
    # A format that OpenSlide knows and refuses is broken; its TIFF would give only parts.
    if fast and vendor in (None, "generic-tiff"):
        try:
            check_whole(path)
            with quiet_tifffile(path.name):
                return open_plain(path)
        except UnsupportedLayoutError as exc:
            reason = str(exc)
    raise explain(path, str(refused), vendor=vendor, reason=reason) from refused


def _metadata(handle: openslide.OpenSlide) -> Metadata:
    properties = dict(handle.properties)
    return Metadata(
        vendor=properties.get("openslide.vendor", "unknown"),
        level_dimensions=tuple(handle.level_dimensions),
        properties=properties,
        icc_profile=_icc_profile(handle, properties),
        stated_downsamples=tuple(_stated_downsamples(handle)),
    )


def _stated_downsamples(handle: openslide.OpenSlide) -> Iterator[float | None]:
    """What the format says of each level: where it says nothing, OpenSlide takes a mean."""
    width, height = handle.dimensions
    for size, downsample in zip(handle.level_dimensions, handle.level_downsamples, strict=True):
        mean = (width / size[0] + height / size[1]) / 2
        yield None if math.isclose(downsample, mean, rel_tol=1e-9) else downsample


def _stored_tiles(path: Path) -> npt.NDArray[np.bool_] | None:
    """Which tiles of level 0 are there, of a Philips slide; None if all are, or none can tell.

    Outside the areas scanned it has none, and shows white there where a coarser level's tile
    reaches into one.
    """
    try:
        with quiet_tifffile(path.name), tifffile.TiffFile(path) as tiff:
            page = tiff.pages[0].aspage()
            is_there = np.array(page.databytecounts) > 0
            if not page.is_tiled or is_there.all():
                return None
            return is_there.reshape(-1, -(-page.imagewidth // page.tilewidth))
    except _NO_TABLE as exc:
        log.debug("%s: no tile table: %s", path.name, exc)
        return None


def _icc_profile(handle: openslide.OpenSlide, properties: Mapping[str, str]) -> bytes | None:
    if "openslide.icc-size" not in properties:
        return None
    return lowlevel.read_icc_profile(handle._osr)


def _faster_source(
    path: Path,
    metadata: Metadata,
    downsamples: tuple[float, ...],
    judge: OpenSlideSource,
    crew: Crew,
) -> tuple[Metadata, PixelSource] | None:
    """The reader of stored tiles, if it gives OpenSlide's pixels."""
    if metadata.vendor in _MOVED_TILES:
        return None
    difference = None
    # Photometric tag first, as scanners mean it; then what the JPEG stream itself says.
    for trust in (True, False):
        table = _tile_table(path, metadata, trust_photometric=trust)
        if table is None:
            return None
        if table.is_turned:
            return table.metadata, TiffSource(
                path, table.levels, metadata.background, judge=None, name="tifffile"
            )
        source = TiffSource(path, table.levels, metadata.background, judge=judge)
        difference = first_difference(
            source,
            judge,
            levels=[level for level in sorted(table.levels) if level < len(downsamples)],
            dimensions=metadata.level_dimensions,
            downsamples=downsamples,
            # Where a tile is missing the judge stands in, and would be compared with itself.
            fullest={
                number: level.fullest
                for number, level in table.levels.items()
                if level.fullest is not None
            },
            crew=crew,
        )
        if difference is None:
            return table.metadata, source
    log.info("%s: read through OpenSlide; its tiles differ at %s", path.name, difference)
    return None


@dataclass(frozen=True, kw_only=True)
class _TileTable:
    """The levels of a TIFF that can be read directly.

    Attributes:
        metadata: OpenSlide's, with levels and warnings added that it does not have.
        levels: By number.
        is_turned: Whether OpenSlide's pixels are no guide, because it turns each tile.
    """

    metadata: Metadata
    levels: dict[int, StoredLevel]
    is_turned: bool = False


def _tile_table(path: Path, metadata: Metadata, *, trust_photometric: bool) -> _TileTable | None:
    """The levels of OpenSlide that are pages of a TIFF."""
    try:
        with tifffile.TiffFile(path) as tiff:
            pages = [
                page for page in tiff.pages if isinstance(page, tifffile.TiffPage) and page.is_tiled
            ]
            metadata, pages = _with_sub_levels(metadata, pages)
            levels = _matching_levels(pages, metadata, trust_photometric=trust_photometric)
            cut_off = cut_off_sentence(path.name, levels.values(), path.stat().st_size)
            metadata = replace(
                metadata,
                warnings=(
                    *metadata.warnings,
                    *_warnings(path.name, [page for page in pages if _fits(page, metadata)]),
                    *([] if cut_off is None else [cut_off]),
                ),
            )
            turned = any(_orientation(page) != 1 for page in pages if _fits(page, metadata))
    except _NO_TABLE as exc:
        log.debug("%s: no tile table: %s", path.name, exc)
        return None
    if turned and len(levels) < len(metadata.level_dimensions):
        return None
    return _TileTable(metadata=metadata, levels=levels, is_turned=turned) if levels else None


def _fits(page: tifffile.TiffPage, metadata: Metadata) -> bool:
    return (page.imagewidth, page.imagelength) in metadata.level_dimensions


def _with_sub_levels(
    metadata: Metadata, pages: list[tifffile.TiffPage]
) -> tuple[Metadata, list[tifffile.TiffPage]]:
    """Levels below the first page, where OME-TIFF has them and OpenSlide does not look."""
    if metadata.vendor != "generic-tiff" or len(metadata.level_dimensions) > 1 or not pages:
        return metadata, pages
    below = [page for page in sub_levels(pages[0]) if page.is_tiled]
    sizes = tuple((page.imagewidth, page.imagelength) for page in below)
    return (
        replace(metadata, level_dimensions=(*metadata.level_dimensions, *sizes)),
        [*pages, *below],
    )


def _matching_levels(
    pages: list[tifffile.TiffPage], metadata: Metadata, *, trust_photometric: bool
) -> dict[int, StoredLevel]:
    levels: dict[int, StoredLevel] = {}
    dimensions = metadata.level_dimensions
    sizes = [(page.imagewidth, page.imagelength) for page in pages]
    if metadata.vendor == "philips" and len(pages) == len(dimensions):
        # Padded to whole tiles, which OpenSlide takes off; each tiled page is a level.
        sizes = list(dimensions)
    for page, size in zip(pages, sizes, strict=True):
        # Two pages, or two levels, of one size: which is which cannot be told.
        if dimensions.count(size) != 1 or sizes.count(size) != 1:
            continue
        try:
            level = stored_level(page, trust_photometric=trust_photometric)
        except UnsupportedLayoutError as exc:
            log.debug("%d x %d through OpenSlide: %s", *size, exc)
            continue
        levels[dimensions.index(size)] = level
    return levels


def _warnings(name: str, pages: list[tifffile.TiffPage]) -> Iterator[str]:
    if not pages:
        return
    turn = _orientation(pages[0])
    if turn != 1:
        yield (
            f"{name}: TIFF orientation {turn} asks for a turned picture; it is read as stored, "
            "not turned"
        )
    if pages[0].samplesperpixel == 1:
        yield (
            f"{name}: one grey channel instead of colour; models for stained tissue expect RGB, "
            "and a label mask is no slide"
        )


def _orientation(page: tifffile.TiffPage) -> int:
    tag = page.tags.get(274)
    return 1 if tag is None else int(tag.value)
