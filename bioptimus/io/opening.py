"""From a path to a source of pixels: which reader opens the file, and what it says about it."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import openslide
import tifffile
from openslide import lowlevel

from bioptimus.errors import SlideOpenError
from bioptimus.io.judge import first_difference
from bioptimus.io.sources import WHITE, Colour, OpenSlideSource, PixelSource
from bioptimus.io.tiff import StoredLevel, TiffSource, UnsupportedLayoutError, stored_level

log = logging.getLogger(__name__)

# Formats whose stored tiles overlap or are moved about: a table of tiles does not tell where
# their pixels belong.
_MOVED_TILES = ("ventana", "trestle", "zeiss", "mirax", "dicom", "hamamatsu", "sakura")


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """What is copied from the file on opening, so that a dead handle takes nothing with it.

    Attributes:
        vendor: OpenSlide's name of the format.
        level_dimensions: (width, height) of each level.
        properties: As OpenSlide names them.
        icc_profile: The embedded colour profile.
        warnings: What a user should know, one sentence each.
    """

    vendor: str
    level_dimensions: tuple[tuple[int, int], ...]
    properties: Mapping[str, str]
    icc_profile: bytes | None = None
    warnings: tuple[str, ...] = ()

    @property
    def background(self) -> Colour:
        """(r, g, b) of what was not scanned; white if the file names none."""
        text = self.properties.get("openslide.background-color", "")
        try:
            red, green, blue = bytes.fromhex(text)
        except ValueError:
            return WHITE
        return (red, green, blue)


def open_source(path: Path, *, fast: bool) -> tuple[Metadata, PixelSource]:
    """Open a slide with the reader that suits it.

    Args:
        path: The slide's file.
        fast: Whether readers other than OpenSlide may be used.

    Raises:
        SlideOpenError: No reader can open it.
    """
    if not path.exists():
        raise SlideOpenError(f"{path}: no such file; check the path")
    try:
        handle = openslide.OpenSlide(path)
        metadata = _metadata(handle)
        downsamples = handle.level_downsamples
    except openslide.OpenSlideError as exc:
        raise SlideOpenError(f"{path.name}: cannot be opened ({exc})") from exc
    judge = OpenSlideSource(path, handle, metadata.background)
    faster = _faster_source(path, metadata, downsamples, judge) if fast else None
    return metadata, faster or judge


def _metadata(handle: openslide.OpenSlide) -> Metadata:
    properties = dict(handle.properties)
    return Metadata(
        vendor=properties.get("openslide.vendor", "unknown"),
        level_dimensions=tuple(handle.level_dimensions),
        properties=properties,
        icc_profile=_icc_profile(handle, properties),
    )


def _icc_profile(handle: openslide.OpenSlide, properties: Mapping[str, str]) -> bytes | None:
    if "openslide.icc-size" not in properties:
        return None
    return lowlevel.read_icc_profile(handle._osr)


def _faster_source(
    path: Path, metadata: Metadata, downsamples: tuple[float, ...], judge: OpenSlideSource
) -> TiffSource | None:
    """The reader of stored tiles, if it gives OpenSlide's pixels."""
    if metadata.vendor in _MOVED_TILES:
        return None
    difference = None
    # Photometric tag first, as scanners mean it; then what the JPEG stream itself says.
    for trust in (True, False):
        levels = _stored_levels(path, metadata.level_dimensions, trust_photometric=trust)
        if not levels:
            return None
        source = TiffSource(path, levels, metadata.background, judge=judge)
        difference = first_difference(
            source,
            judge,
            levels=sorted(levels),
            dimensions=metadata.level_dimensions,
            downsamples=downsamples,
        )
        if difference is None:
            return source
    log.info("%s: read through OpenSlide; its tiles differ at %s", path.name, difference)
    return None


def _stored_levels(
    path: Path, dimensions: tuple[tuple[int, int], ...], *, trust_photometric: bool
) -> dict[int, StoredLevel]:
    """The levels of OpenSlide that are pages of a TIFF, found by their size."""
    levels: dict[int, StoredLevel] = {}
    try:
        with tifffile.TiffFile(path) as tiff:
            pages = [
                page for page in tiff.pages if isinstance(page, tifffile.TiffPage) and page.is_tiled
            ]
            for page in pages:
                size = (page.imagewidth, page.imagelength)
                same = [other for other in pages if (other.imagewidth, other.imagelength) == size]
                if dimensions.count(size) != 1 or len(same) != 1 or _is_turned(page):
                    continue
                try:
                    level = stored_level(page, trust_photometric=trust_photometric)
                except UnsupportedLayoutError as exc:
                    log.debug("%s: %d x %d through OpenSlide: %s", path.name, *size, exc)
                    continue
                levels[dimensions.index(size)] = level
    except (tifffile.TiffFileError, OSError, ValueError) as exc:
        log.debug("%s: no tile table: %s", path.name, exc)
        return {}
    return levels


def _is_turned(page: tifffile.TiffPage) -> bool:
    """Whether the page is to be shown turned or mirrored."""
    tag = page.tags.get(274)
    return tag is not None and int(tag.value) != 1
