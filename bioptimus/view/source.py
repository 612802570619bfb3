"""What a picture is made from: one result file, and the slide itself where it is at hand."""

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from bioptimus.errors import BioptimusError, SlideOpenError, UsageError
from bioptimus.tiles import Tile, TileSpec
from bioptimus.view.components import Floats, every_nth, sample_step
from bioptimus.view.lattice import Lattice
from bioptimus.view.scales import Quantity

if TYPE_CHECKING:
    from bioptimus.inference.results import Result, RowsName
    from bioptimus.io.wsi import Slide

logger = logging.getLogger(__name__)

# 4,096 rows of 1,536 floats are 24 MiB.
_BLOCK_BYTES = 24 << 20

# A coarse image of a slide that stores no small level means decoding all of it; beyond this
# the thumbnail in the file has to do.
_MAX_LEVEL_PIXELS = 64_000_000

_FALLBACK = (
    "drawing from the small picture in the result; pass --slide PATH where the slide has moved, "
    "or --no-slide"
)


class Rows(Protocol):
    """Rows of a dataset, read when sliced."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, columns)."""
        ...

    def __getitem__(self, key: slice, /) -> npt.NDArray[Any]:
        """Some of the rows; the slice has no step."""
        ...


@dataclass(frozen=True, kw_only=True)
class Ground:
    """A picture of the slide.

    Attributes:
        pixels: (H, W, 3) uint8.
        downsample: (x, y) level-0 pixels per pixel of the picture.
    """

    pixels: npt.NDArray[np.uint8]
    downsample: tuple[float, float]

    def crop(self, box: tuple[float, float, float, float]) -> npt.NDArray[np.uint8]:
        """The part under (left, top, right, bottom) in level-0 pixels, at least one pixel."""
        height, width = self.pixels.shape[:2]
        left = min(max(0, int(box[0] / self.downsample[0])), width - 1)
        top = min(max(0, int(box[1] / self.downsample[1])), height - 1)
        right = min(width, max(left + 1, round(box[2] / self.downsample[0])))
        bottom = min(height, max(top + 1, round(box[3] / self.downsample[1])))
        return self.pixels[top:bottom, left:right]


@dataclass(frozen=True, kw_only=True)
class Space:
    """What embeddings are values of: those of one space can be compared.

    Attributes:
        model: Name of the model.
        width: Values of an embedding.
    """

    model: str
    width: int


@dataclass(frozen=True, kw_only=True)
class SlideResult:
    """One result file, in the terms of a picture.

    Attributes:
        name: The slide's file name.
        path: The result file.
        slide_path: Where the slide lay when the file was made; it may be gone.
        digest: Names everything that the rows depend on.
        model: Name of the model.
        coords: (N, 2) int64, x, y of the upper-left corners, level-0 pixels.
        tissue_ratios: (N,) float32, 0..1.
        dimensions: (width, height) of the slide, level-0 pixels.
        mpp: (x, y) µm per level-0 pixel.
        tile: Size, scale and overlap of the tiles.
        features: (N, D) embeddings, read when sliced; None where the file has none.
        predictions: (N, K), read when sliced; None where the file has none.
        output_names: (K,) names of the predicted values.
        output_unit: Unit of every predicted value where the model tells one, else "".
        thumbnail: The picture in the file.
        mask: (H, W) bool, and its (x, y) downsample; None where tissue was not searched.
        failed: (M, 2) int64, corners of the tiles that have no row.
        to_srgb: Whether the tiles went through the slide's colour profile.
    """

    name: str
    path: Path
    slide_path: Path
    digest: str
    model: str
    coords: npt.NDArray[np.int64]
    tissue_ratios: npt.NDArray[np.float32]
    dimensions: tuple[int, int]
    mpp: tuple[float, float]
    tile: TileSpec
    features: Rows | None
    predictions: Rows | None
    output_names: tuple[str, ...]
    output_unit: str
    thumbnail: Ground | None
    mask: tuple[npt.NDArray[np.bool_], tuple[float, float]] | None
    failed: npt.NDArray[np.int64]
    to_srgb: bool = False

    def __len__(self) -> int:
        """Number of tiles that have a row."""
        return len(self.coords)

    @property
    def tile_level0(self) -> tuple[float, float]:
        """(width, height) of a tile in level-0 pixels."""
        return self.tile.side_um / self.mpp[0], self.tile.side_um / self.mpp[1]

    @property
    def stride_level0(self) -> tuple[float, float]:
        """(x, y) distance of neighbours' corners in level-0 pixels."""
        step = self.tile.stride_px * self.tile.mpp
        return step / self.mpp[0], step / self.mpp[1]

    @property
    def space(self) -> Space | None:
        """What its embeddings are values of; None where there are none."""
        if self.features is None or not len(self):
            return None
        return Space(model=self.model, width=self.features.shape[1])

    def lattice(self) -> Lattice:
        """Where the tiles lie; for N ≥ 1."""
        return Lattice.of(
            self.coords, tile_level0=self.tile_level0, stride_level0=self.stride_level0
        )

    def feature_blocks(self) -> Iterator[Floats]:
        """The embeddings, some 24 MiB at a time, as float32.

        Raises:
            UsageError: The file holds no embeddings.
        """
        if self.features is None:
            raise UsageError(
                f"{self.path.name}: holds no embeddings; run `bioptimus embed`, or "
                "`bioptimus predict --with-embeddings`"
            )
        return _blocks(self.features)

    def feature_sample(self, *, wanted: int) -> Floats:
        """At most ``wanted`` embeddings, evenly spaced in plan order, (n, D) float32."""
        step = sample_step(len(self), wanted=wanted)
        parts = list(every_nth(self.feature_blocks(), step))
        width = 0 if self.features is None else self.features.shape[1]
        return np.concatenate(parts) if parts else np.zeros((0, width), np.float32)

    def column(self, name: str) -> Floats:
        """One predicted value of every tile, (N,) float32.

        Args:
            name: One of ``output_names``, in any case, or its number from 0.

        Raises:
            UsageError: The file has no predictions, or none of that name.
        """
        return self.columns([name])[0]

    def columns(self, names: Sequence[str]) -> list[Floats]:
        """Several of them, from one pass through the file; see :meth:`column`."""
        positions = [self.column_number(name) for name in names]
        assert self.predictions is not None
        parts = [block[:, positions] for block in _blocks(self.predictions)]
        values = np.concatenate([np.zeros((0, len(names)), np.float32), *parts])
        return list(np.ascontiguousarray(values.T))

    def quantity(self, name: str) -> Quantity:
        """What the values of a column are; see :meth:`column`."""
        return Quantity(model=self.model, name=self.output_names[self.column_number(name)])

    def column_number(self, name: str) -> int:
        """Number of a predicted value, from 0; see :meth:`column`."""
        if self.predictions is None:
            raise UsageError(
                f"{self.path.name}: holds no predictions; run `bioptimus predict` first"
            )
        for position, known in enumerate(self.output_names):
            if known.casefold() == name.casefold():
                return position
        width = self.predictions.shape[1]
        if name.isdecimal() and int(name) < width:
            return int(name)
        some = ", ".join(self.output_names[:8]) + (" …" if len(self.output_names) > 8 else "")
        known_text = f"known are {some}" if some else f"columns are 0 to {width - 1}"
        raise UsageError(f"{self.path.name}: no predicted value named {name}; {known_text}")

    def tile_at(self, location: tuple[float, float]) -> int:
        """Row of the tile that holds a point; of several, of the one whose centre is nearest.

        Args:
            location: x, y in level-0 pixels.

        Raises:
            UsageError: No tile of the result holds the point.
        """
        spot = f"{location[0]:g},{location[1]:g}"
        width, height = self.dimensions
        if not (0 <= location[0] < width and 0 <= location[1] < height and len(self.coords)):
            raise UsageError(
                f"{spot}: no tile there; the slide has {width} x {height} px and "
                f"{len(self.coords)} tiles"
            )
        half = np.asarray(self.tile_level0) / 2
        away = np.abs(self.coords + half - np.asarray(location))
        row = int(np.square(away).sum(axis=1).argmin())
        if not (away[row] <= half).all():
            x, y = self.coords[row].tolist()
            raise UsageError(
                f"{spot}: no tile there; the nearest is row {row}, from {x},{y} on: --tile {row}"
            )
        return row


def _blocks(rows: Rows) -> Iterator[Floats]:
    count, width = rows.shape
    step = max(1, _BLOCK_BYTES // (4 * max(1, width)))
    for start in range(0, count, step):
        yield np.asarray(rows[start : start + step], np.float32)


@dataclass(frozen=True, kw_only=True)
class _DatasetRows:
    """Rows of one dataset of a result file."""

    result: "Result"
    name: "RowsName"
    shape: tuple[int, ...]

    def __getitem__(self, key: slice, /) -> npt.NDArray[Any]:
        start, stop, _ = key.indices(self.shape[0])
        return self.result.read(self.name, start, stop)


def open_source(path: Path) -> SlideResult:
    """Open a result file for pictures; its large arrays are read as they are needed.

    Raises:
        OutputError: The file is missing, unfinished, damaged or not a result file.
    """
    from bioptimus.inference.results import open_result

    return source_of(open_result(path))


def embeddings_of(path: Path) -> tuple[Space | None, int]:
    """Of which space the embeddings of a result file are, and how many; (None, 0) without any.

    Raises:
        OutputError: As :func:`open_source`.
    """
    from bioptimus.inference.results import open_result

    result = open_result(path)
    if not result.embedding_dim or not len(result):
        return None, 0
    return Space(model=result.model.name, width=result.embedding_dim), len(result)


def source_of(result: "Result") -> SlideResult:
    """An opened result file in the terms of a picture.

    Raises:
        OutputError: The file cannot be read any more, or is damaged.
    """
    with result.held_open():
        return _source_of(result)


def _source_of(result: "Result") -> SlideResult:
    count = len(result)
    features = _DatasetRows(result=result, name="features", shape=(count, result.embedding_dim))
    predictions = _DatasetRows(
        result=result, name="predictions", shape=(count, result.prediction_dim)
    )
    failed = [(tile.x, tile.y) for tile in result.failed_tiles]
    thumbnail, mask = result.thumbnail, result.tissue_mask
    return SlideResult(
        name=result.slide_name,
        path=result.path,
        slide_path=result.slide_path,
        digest=result.digest,
        model=result.model.name,
        coords=result.coords,
        tissue_ratios=result.tissue_ratios,
        dimensions=result.dimensions,
        mpp=result.mpp,
        tile=result.tile,
        features=features if result.embedding_dim else None,
        predictions=predictions if result.prediction_dim else None,
        output_names=result.output_names,
        # The models that take log1p give back TPM.
        output_unit="TPM" if result.model.omics_transform == "log1p" else "",
        thumbnail=Ground(pixels=thumbnail.pixels, downsample=thumbnail.downsample)
        if thumbnail
        else None,
        mask=(mask.pixels > 0, mask.downsample) if mask else None,
        failed=np.array(failed, np.int64).reshape(-1, 2),
        to_srgb=result.attributes.get("icc") == "srgb",
    )


class SlidePictures:
    """Pixels for pictures: from the slide where it can be opened, else from the thumbnail.

    Owner: the one picture being drawn; use as a context manager. A slide that is gone or
    cannot be read is no error here, the thumbnail is in the file.
    """

    def __init__(self, result: SlideResult, slide: Path | None) -> None:
        self._result = result
        self._slide: Slide | None = None
        if slide is not None:
            try:
                self._slide = open_slide(slide, result)
            except BioptimusError as exc:
                logger.warning("%s; %s", exc, _FALLBACK)

    def __enter__(self) -> "SlidePictures":
        return self

    def __exit__(self, *_: object) -> None:
        if self._slide is not None:
            self._slide.close()

    @property
    def sharp(self) -> bool:
        """Whether pixels come from the slide itself."""
        return self._slide is not None

    def ground(self, max_px: int) -> Ground | None:
        """Picture of the whole slide, its longer side about ``max_px``, or None."""
        stored = self._result.thumbnail
        if self._slide is None or (stored and max(stored.pixels.shape[:2]) >= max_px):
            return stored
        levels: list[tuple[int, int]] = [
            size for size in self._slide.level_dimensions if max(size) >= max_px
        ]
        if levels and min(width * height for width, height in levels) > _MAX_LEVEL_PIXELS:
            return stored
        try:
            image = self._slide.thumbnail(max_px)
        except BioptimusError as exc:
            logger.warning("%s: %s; drawing from the stored thumbnail", self._result.name, exc)
            return stored
        return Ground(pixels=image.pixels, downsample=image.downsample)

    def tiles(self, rows: npt.NDArray[np.int64]) -> list[npt.NDArray[np.uint8]]:
        """The pixels of some tiles, as the model saw them where the slide is there.

        Args:
            rows: Row numbers.

        Returns:
            One (h, w, 3) uint8 array a row; small where only a thumbnail is there, a grey
            square where there is not even that.
        """
        result = self._result
        width, height = result.tile_level0
        found: list[npt.NDArray[np.uint8]] = []
        for row in rows:
            x, y = (int(value) for value in result.coords[row])
            tile = Tile(index=int(row), x=x, y=y, width=width, height=height)
            found.append(self._tile(tile))
        return found

    def _tile(self, tile: Tile) -> npt.NDArray[np.uint8]:
        if self._slide is not None:
            try:
                pixels: npt.NDArray[np.uint8] = self._slide.tile_reader(self._result.tile).read(
                    tile
                )
            except BioptimusError as exc:
                logger.warning("%s: %s; cut from the stored thumbnail", self._result.name, exc)
            else:
                return pixels
        if self._result.thumbnail is None:
            return np.full((8, 8, 3), 200, np.uint8)
        return self._result.thumbnail.crop(
            (tile.x, tile.y, tile.x + tile.width, tile.y + tile.height)
        )


def find_slide(
    result: SlideResult, path: Path | None = None, *, told: set[Path] | None = None
) -> Path | None:
    """The slide of a result, or None with one warning line.

    To be asked once before pictures are drawn, which would each warn.

    Args:
        result: The result.
        path: The slide; by default where it lay when the result was made.
        told: Slides of which there was a warning already, and need be none again; added to.
    """
    path = result.slide_path if path is None else path
    told = set() if told is None else told
    try:
        open_slide(path, result).close()
    except BioptimusError as exc:
        if path not in told:
            logger.warning("%s; %s", exc, _FALLBACK)
        told.add(path)
        return None
    return path


def open_slide(path: Path, result: SlideResult) -> "Slide":
    """Open the slide of a result.

    Raises:
        SlideOpenError: It is not there, or cannot be opened.
        UsageError: It is another slide, as far as its size tells.
    """
    from bioptimus.io.wsi import OpenOptions, Slide

    if not os.path.exists(path):
        raise SlideOpenError(f"{path}: the slide is not there any more")
    # The resolution and colours that the file was made with, whatever the slide says of itself: but
    # a resolution that differs between the axes was its own word, as nobody can give such a one.
    x, y = result.mpp
    options = OpenOptions(
        mpp_override=x if x == y else None,
        icc="srgb" if result.to_srgb else "none",
        allow_upsample=True,
    )
    slide = Slide.open(path, options)
    if tuple(slide.dimensions) != result.dimensions:
        slide.close()
        raise UsageError(
            f"{path}: is {slide.dimensions[0]} x {slide.dimensions[1]} px, {result.path.name} was "
            f"made from {result.dimensions[0]} x {result.dimensions[1]} px"
        )
    return slide
