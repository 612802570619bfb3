"""Reading result files: :func:`open_result`. The slide itself is not needed."""

import errno
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from html import escape
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import h5py
import numpy as np
import numpy.typing as npt

from bioptimus.counting import counted
from bioptimus.errors import CheckpointError, OutputError
from bioptimus.inference.checksums import checksum, row_checksums
from bioptimus.inference.hdf5_image import CHECK_DISK, damage_told, open_to_read, values_of
from bioptimus.inference.layout import (
    CHECKSUM,
    FORMAT,
    FORMAT_VERSION,
    PART_SUFFIX,
    REQUIRED_ATTRIBUTES,
    REQUIRED_DATASETS,
    ROW_CHECKSUMS,
)
from bioptimus.kinds import checks_kinds
from bioptimus.models.types import InferenceMode, ModelSpec
from bioptimus.tiles import TileSpec

if TYPE_CHECKING:
    from anndata import AnnData

# Predictions of 20,000 genes are not read for the sake of a look at the embeddings.
_MOST_READ_TO_CHECK = 1 << 30
# Rows that are read at a time, where only a part of them or their checksum is wanted.
_BLOCK_BYTES = 16 << 20
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
# Attributes that a reader divides by.
_POSITIVE = ("slide_width", "slide_height", "mpp_x", "mpp_y", "tile_size_px", "tile_mpp")

# Of each dataset: its number of axes, and the kinds of values that it may hold, as NumPy's letters.
_LAYOUT = {
    "features": (2, "f"),
    "predictions": (2, "f"),
    "coords": (2, "iu"),
    "tissue_ratios": (1, "f"),
    ROW_CHECKSUMS: (1, "u"),
    "failed_tiles": (1, "V"),
    "output_names": (1, "OS"),
    "input_gene_names": (1, "OS"),
    "thumbnail": (3, "u"),
    "tissue_mask": (2, "u"),
}

RowsName = Literal["features", "predictions", "coords", "tissue_ratios", "row_crc32"]


@dataclass(frozen=True, kw_only=True)
class FailedTile:
    """A tile that has no row.

    Attributes:
        x: Left edge, level-0 pixels.
        y: Upper edge, level-0 pixels.
        stage: Where it failed, such as ``read`` or ``output``.
        reason: The error's words.
    """

    x: int
    y: int
    stage: str
    reason: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Picture:
    """A small image of the slide.

    Attributes:
        pixels: (H, W, 3) or (H, W), uint8.
        downsample: (x, y) level-0 pixels per pixel.
    """

    pixels: npt.NDArray[np.uint8]
    downsample: tuple[float, float]


class Result:
    """A finished result file. Arrays are read when they are asked for, and kept.

    The file is open only while something is read, so many results may be held at once. What is
    read is compared with its checksum, so that a damaged file is an error and not other numbers;
    :mod:`bioptimus.verify` looks at the rest.

    Attributes:
        path: The file.
        attributes: Root attributes as plain Python values; JSON text is read as a mapping.
        coords_attributes: Attributes of ``coords``, under TRIDENT's names.
    """

    def __init__(self, path: Path, *, check: bool = True) -> None:
        """Use :func:`open_result`."""
        self.path = path
        self._checked = check
        self._held: h5py.File | None = None
        with self._file() as file:
            self.attributes: Mapping[str, Any] = _attributes(file)
            found = {_decoded(name): file[name] for name in file}
            # Foreign files may hold groups, which have no shape.
            self._shapes: Mapping[str, tuple[int, ...]] = {
                name: getattr(each, "shape", ()) for name, each in found.items()
            }
            _check(path, self.attributes, self._shapes)
            _check_datasets(path, found)
            self.coords_attributes: Mapping[str, Any] = _attributes(found["coords"])

    def __len__(self) -> int:
        """Number of rows: tiles that were embedded or predicted."""
        return int(self._shapes["coords"][0])

    def __repr__(self) -> str:
        return (
            f"<Result {self.slide_name}: {len(self)} tiles, model {self.model.name}, "
            f"{self.embedding_dim} embedding and {self.prediction_dim} predicted values>"
        )

    # What was processed

    @property
    def state(self) -> str:
        """``ok``, or ``empty`` for a slide without tissue."""
        return str(self.attributes["state"])

    @property
    def digest(self) -> str:
        """Names everything the rows depend on."""
        return str(self.attributes["digest"])

    @property
    def slide_name(self) -> str:
        """File name of the slide."""
        return str(self.attributes["slide_name"])

    @property
    def slide_path(self) -> Path:
        """The slide as it was given; it need not be there any more."""
        return Path(str(self.attributes.get("slide_path", self.slide_name)))

    @property
    def dimensions(self) -> tuple[int, int]:
        """(width, height) of the slide in level-0 pixels."""
        return int(self.attributes["slide_width"]), int(self.attributes["slide_height"])

    @property
    def mpp(self) -> tuple[float, float]:
        """(x, y) µm per level-0 pixel."""
        return float(self.attributes["mpp_x"]), float(self.attributes["mpp_y"])

    @cached_property
    def model(self) -> ModelSpec:
        """Specification of the model; its names come from the datasets that hold them.

        Raises:
            OutputError: The file's is none.
        """
        try:
            spec = ModelSpec.from_dict(self.attributes["model_spec"])
            names = self._strings("output_names")
            genes = self.input_gene_names
            return spec.with_(
                output_names=names if len(names) == spec.prediction_dim else (),
                input_genes=genes if len(genes) == spec.rna_dim else (),
            )
        except CheckpointError as exc:
            raise OutputError(f"{self.path}: {exc}") from exc

    @property
    def model_sha256(self) -> str:
        """Digest of the model's weights file."""
        return str(self.attributes["model_sha256"])

    @property
    def mode(self) -> InferenceMode:
        """What was computed."""
        return InferenceMode(self.attributes["mode"])

    @property
    def tile(self) -> TileSpec:
        """Size, scale and overlap of the tiles."""
        return _tile_of(self.attributes)

    @property
    def tile_level0(self) -> tuple[float, float]:
        """(width, height) of a tile in level-0 pixels; rarely whole numbers."""
        return self.tile.side_um / self.mpp[0], self.tile.side_um / self.mpp[1]

    # Rows

    @property
    def embedding_dim(self) -> int:
        """Values per embedding; 0 where there is none."""
        return int(self._shapes["features"][1]) if "features" in self._shapes else 0

    @property
    def prediction_dim(self) -> int:
        """Values per prediction; 0 where there is none."""
        return int(self._shapes["predictions"][1]) if "predictions" in self._shapes else 0

    def holds(self, name: str) -> bool:
        """Whether the file has a dataset; nothing of it is read."""
        return name in self._shapes

    @cached_property
    def features(self) -> npt.NDArray[np.floating[Any]]:
        """(N, D) embeddings.

        Raises:
            OutputError: This file has none.
        """
        return self.read("features")

    @cached_property
    def predictions(self) -> npt.NDArray[np.floating[Any]]:
        """(N, K) predictions.

        Raises:
            OutputError: This file has none.
        """
        return self.read("predictions")

    @cached_property
    def coords(self) -> npt.NDArray[np.int64]:
        """(N, 2) x and y of the tiles' upper-left corners, level-0 pixels.

        Raises:
            OutputError: One is outside the slide.
        """
        coords: npt.NDArray[np.int64] = self.read("coords")
        if self._checked and (problem := position_problem(coords, self.dimensions)):
            raise OutputError(f"{self.path}: {problem}; make it again")
        return coords

    @cached_property
    def tissue_ratios(self) -> npt.NDArray[np.float32]:
        """(N,) share of each tile that is tissue."""
        return self.read("tissue_ratios")

    @property
    def coords_um(self) -> npt.NDArray[np.float64]:
        """(N, 2) x and y of the tiles' upper-left corners, µm from the slide's corner."""
        return np.multiply(self.coords, self.mpp, dtype=np.float64)

    @property
    def centers(self) -> npt.NDArray[np.float64]:
        """(N, 2) x and y of the tiles' centres, level-0 pixels."""
        return self.coords + np.array(self.tile_level0) / 2

    @property
    def centers_um(self) -> npt.NDArray[np.float64]:
        """(N, 2) x and y of the tiles' centres, µm from the slide's corner."""
        return self.coords_um + self.tile.side_um / 2

    @checks_kinds
    def read(self, name: RowsName, start: int = 0, stop: int | None = None) -> npt.NDArray[Any]:
        """Rows [start, stop) of a dataset, read anew each time.

        Args:
            name: The dataset.
            start: First row, from 0.
            stop: Row after the last; None: to the end.

        Returns:
            (stop - start, ...) in the dataset's own type, for less memory than its attribute.

        Raises:
            UsageError: There is no dataset of rows of that name, or a bound is no number.
            OutputError: The file has no such dataset, can no longer be read, or holds other values
                than were written.
        """
        if name not in self._shapes:
            there = ", ".join(sorted(self._shapes))
            raise OutputError(f"{self.path}: has no {name} (it has {there})")
        with self._file() as file:
            if start == 0 and stop is None:
                return self._whole(file[name])
            rows: npt.NDArray[Any] = file[name][start:stop]
            place = slice(start, stop)
            self._refuse_changed_rows(file, name, place, rows, most_bytes=_MOST_READ_TO_CHECK)
        return rows

    def _whole(self, dataset: h5py.Dataset) -> npt.NDArray[Any]:
        """All of a dataset."""
        values = values_of(dataset)
        name = dataset.name.removeprefix("/")
        wanted = dataset.attrs.get(CHECKSUM) if self._checked else None
        if wanted is not None and checksum(values) != wanted:
            raise self._changed(name)
        self._refuse_changed_rows(
            dataset.file, name, slice(0, None), values, most_bytes=_MOST_READ_TO_CHECK
        )
        return values

    @property
    def _kinds(self) -> list[str]:
        """The kinds of values that a row has, in the order of their checksum."""
        return [kind for kind in ("features", "predictions") if kind in self._shapes]

    def _refuse_changed_rows(
        self,
        file: h5py.File,
        name: str,
        rows: slice,
        values: npt.NDArray[Any],
        *,
        most_bytes: float = math.inf,
    ) -> None:
        kinds = self._kinds
        if not (self._checked and name in kinds):
            return
        # One checksum is over both kinds of a row, so the other one has to be read as well.
        others = [file[kind].nbytes for kind in kinds if kind != name]
        if not self.has_row_checksums or any(nbytes > most_bytes for nbytes in others):
            bad = np.flatnonzero(~np.isfinite(values).all(axis=1))
            if len(bad):
                raise OutputError(
                    f"{self.path}: has NaN or Inf in {name} of row {rows.start + int(bad[0])}, "
                    "which no result has as it is written; make it again with --overwrite"
                )
            return
        sums: npt.NDArray[np.uint32] | None = None
        for kind in kinds:
            sums = row_checksums(values if kind == name else file[kind][rows], sums)
        changed = np.flatnonzero(sums != file[ROW_CHECKSUMS][rows])
        if len(changed):
            raise self._changed(f"row {rows.start + int(changed[0])}")

    def _changed(self, where: str) -> OutputError:
        return OutputError(
            f"{self.path}: has other values in {where} than were written; it is damaged or was "
            "edited: make it again with --overwrite"
        )

    @property
    def has_row_checksums(self) -> bool:
        """Whether the file tells the checksum of each row; older ones do not."""
        return self.holds(ROW_CHECKSUMS)

    def check(self, *, rows: bool = False) -> None:
        """Refuse a file whose small datasets hold other values than were written.

        Args:
            rows: Look at every row, too.

        Raises:
            OutputError: It does.
        """
        if changed := self.changed_datasets():
            raise self._changed(", ".join(changed))
        for kind in self._kinds[: int(rows)]:
            step = max(1, _BLOCK_BYTES // (4 * self._shapes[kind][1]))
            with self._file() as file:
                for first in range(0, len(self), step):
                    place = slice(first, first + step)
                    self._refuse_changed_rows(file, kind, place, file[kind][place])

    def changed_datasets(self) -> list[str]:
        """Names of the small datasets whose values are not those that were written.

        Rows have checksums of their own, see ``row_crc32`` in docs/hdf5.md.
        """
        with self._file() as file:
            told = {name: file[name].attrs.get(CHECKSUM) for name in self._shapes}
            return [
                name
                for name, wanted in told.items()
                if wanted is not None and checksum(values_of(file[name])) != wanted
            ]

    @checks_kinds
    def prediction(self, name: str) -> npt.NDArray[np.floating[Any]]:
        """(N,) one predicted value, by its name.

        Raises:
            OutputError: Nothing of that name was predicted.
        """
        if name not in self.output_names:
            some = ", ".join(self.output_names[:8])
            raise OutputError(f"{self.path}: has no prediction {name!r} (it has {some} ...)")
        index = self.output_names.index(name)
        if "predictions" in vars(self):
            return self.predictions[:, index]
        # Of thousands of genes only one is held in memory.
        step = max(1, _BLOCK_BYTES // (4 * self.prediction_dim))
        with self.held_open():
            parts = [
                self.read("predictions", first, first + step)[:, index].copy()
                for first in range(0, max(1, len(self)), step)
            ]
        return np.concatenate(parts)

    @cached_property
    def output_names(self) -> tuple[str, ...]:
        """Names of the predicted values; ``output_0`` and so on where the model gave none."""
        given = self._strings("output_names")
        return given or tuple(f"output_{i}" for i in range(self.prediction_dim))

    @cached_property
    def input_gene_names(self) -> tuple[str, ...]:
        """Genes of the bulk RNA that went in; empty if none."""
        return self._strings("input_gene_names")

    @cached_property
    def failed_tiles(self) -> tuple[FailedTile, ...]:
        """Tiles that have no row, with the reason."""
        with self._file() as file:
            table = self._whole(file["failed_tiles"])
        return tuple(
            FailedTile(x=int(x), y=int(y), stage=_decoded(stage), reason=_decoded(reason))
            for x, y, stage, reason in table
        )

    # Pictures

    @cached_property
    def thumbnail(self) -> Picture | None:
        """The slide, small, RGB, in the colours stored in it; None where the file has none."""
        return self._picture("thumbnail")

    @cached_property
    def tissue_mask(self) -> Picture | None:
        """Where tissue was found: 0 or 1; None where the file does not say."""
        return self._picture("tissue_mask")

    # Elsewhere

    def to_anndata(self) -> "AnnData":
        """The rows as an AnnData object, as scanpy and squidpy use it.

        ``X`` holds the predictions, with their names as variables, or the embeddings where
        nothing was predicted; embeddings also stand in ``obsm["X_embedding"]``. Tile centres
        stand in ``obsm["spatial"]`` (level-0 pixels, where the thumbnail's scale factor
        belongs) and ``obsm["spatial_um"]``.

        Raises:
            OutputError: The package anndata is not installed.
        """
        try:
            import anndata
            import pandas
        except ImportError as exc:
            raise OutputError(
                "AnnData needs the package anndata: pip install 'bioptimus-wsi[anndata]'"
            ) from exc
        names = [f"{x}_{y}" for x, y in self.coords.tolist()]
        obs = pandas.DataFrame(
            {
                "x": self.coords[:, 0],
                "y": self.coords[:, 1],
                "tissue_ratio": self.tissue_ratios,
                "slide": pandas.Categorical([self.slide_name] * len(self)),
            },
            index=pandas.Index(names, dtype=object),
        )
        variables = (
            list(self.output_names)
            if self.prediction_dim
            else [f"embedding_{i}" for i in range(self.embedding_dim)]
        )
        data = anndata.AnnData(
            X=(self.predictions if self.prediction_dim else self.features).astype(np.float32),
            obs=obs,
            var=pandas.DataFrame(index=pandas.Index(variables, dtype=object)),
            obsm={"spatial": self.centers, "spatial_um": self.centers_um},
            uns={"spatial": {self.slide_name: self._spatial()}, "bioptimus": self._provenance()},
        )
        if self.embedding_dim:
            data.obsm["X_embedding"] = self.features.astype(np.float32)
        return data

    def plot(self, picture: str = "embedding", **options: Any) -> Any:
        """Draw a picture, as :func:`bioptimus.draw` does; it shows itself in a notebook."""
        # By name: pictures are made on a floor above this one.
        draw = import_module("bioptimus.view.drawing").draw
        return draw(self, picture, **options)

    def _spatial(self) -> dict[str, Any]:
        """What squidpy wants to know of the image under the tiles."""
        found: dict[str, Any] = {
            "scalefactors": {"spot_diameter_fullres": self.tile_level0[0]},
            "metadata": {"mpp_x": self.mpp[0], "mpp_y": self.mpp[1]},
        }
        if self.thumbnail is not None:
            found["images"] = {"hires": self.thumbnail.pixels}
            found["scalefactors"]["tissue_hires_scalef"] = 1 / self.thumbnail.downsample[0]
        return found

    def _provenance(self) -> dict[str, Any]:
        return {
            key: json.dumps(value) if isinstance(value, dict | list) else value
            for key, value in self.attributes.items()
        }

    def _repr_html_(self) -> str:
        """A card for notebooks."""
        rows = {
            "slide": f"{self.slide_name}, {self.dimensions[0]} × {self.dimensions[1]} px, "
            f"{self.mpp[0]:.4g} µm/px",
            "tiles": f"{len(self)} of {self.tile.size_px} px at {self.tile.mpp:g} µm/px"
            + (f", {len(self.failed_tiles)} failed" if self.failed_tiles else ""),
            "model": f"{self.model.name} {self.model.version}",
            "embeddings": str(self.embedding_dim) if self.embedding_dim else "none",
            "predictions": self._predictions_in_words(),
        }
        cells = "".join(
            f"<tr><th style='text-align:left'>{name}</th>"
            f"<td style='text-align:left'>{escape(words)}</td></tr>"
            for name, words in rows.items()
        )
        return (
            "<div style='display:flex;gap:1em;align-items:flex-start'>"
            f"{self._thumbnail_html()}<table>{cells}</table></div>"
        )

    def _predictions_in_words(self) -> str:
        if not self.prediction_dim:
            return "none"
        some = ", ".join(self.output_names[:4])
        return f"{self.prediction_dim}: {some}" + (" …" if self.prediction_dim > 4 else "")

    def _thumbnail_html(self) -> str:
        if self.thumbnail is None:
            return ""
        import base64
        import io

        from PIL import Image

        image = Image.fromarray(self.thumbnail.pixels)
        image.thumbnail((220, 220))
        data = io.BytesIO()
        image.save(data, "PNG")
        text = base64.b64encode(data.getvalue()).decode()
        return f"<img alt='{escape(self.slide_name)}' src='data:image/png;base64,{text}'>"

    @contextmanager
    def held_open(self) -> Iterator[Self]:
        """Keep the file open within the block, where many reads follow each other."""
        if self._held is not None:
            yield self
            return
        with damage_told(self.path):
            file = open_to_read(self.path)
        with file:
            self._held = file
            try:
                yield self
            finally:
                self._held = None

    @contextmanager
    def _file(self) -> Iterator[h5py.File]:
        with damage_told(self.path):
            if self._held is not None:
                yield self._held
                return
            with open_to_read(self.path) as file:
                yield file

    def _strings(self, name: str) -> tuple[str, ...]:
        with self._file() as file:
            if name not in file:
                return ()
            return tuple(map(_decoded, self._whole(file[name]).tolist()))

    def _picture(self, name: str) -> Picture | None:
        if name not in self._shapes:
            return None
        with self._file() as file:
            x, y = (float(value) for value in file[name].attrs["downsample"])
            return Picture(pixels=self._whole(file[name]), downsample=(x, y))


@checks_kinds
def open_result(path: Path | str, *, check: bool = True) -> Result:
    """Open a finished result file.

    Args:
        path: ``.../<slide>.h5``.
        check: Compare what is read with its checksum; false for a file that was edited on purpose.

    Returns:
        The result; its arrays are read when they are asked for.

    Raises:
        OutputError: The file is missing, unreadable, incomplete, foreign, or of a newer version;
            the message says which, and what it lacks.
        UsageError: ``path`` is no path, or ``check`` neither true nor false.
    """
    path = Path(path)
    if path.name.endswith(PART_SUFFIX):
        raise OutputError(f"{path}: is unfinished; run the same command again to go on with it")
    try:
        found = path.stat()
    except (OSError, ValueError) as exc:  # the latter where a name cannot be one
        if isinstance(exc, OSError) and exc.errno not in _ABSENT:
            words = f"cannot be read: {exc.strerror}; {CHECK_DISK}"
            raise OutputError(f"{path}: {words}") from exc
        part = path.with_name(path.name + PART_SUFFIX)
        unfinished = "it is unfinished; run the same command again"
        hint = unfinished if os.path.exists(part) else "check the path"
        raise OutputError(f"{path}: no such file; {hint}") from exc
    if stat.S_ISDIR(found.st_mode):
        raise OutputError(f"{path}: is a folder; name one of the result files in it")
    if not found.st_size:
        raise OutputError(f"{path}: is empty (0 bytes); remove it and make it again")
    if path.suffix != ".h5" and not h5py.is_hdf5(path):
        # Such as a slide, which is not to be moved away and made again.
        raise OutputError(f"{path}: is no result; name a .h5 file that embed or predict has made")
    return Result(path, check=check)


def position_problem(coords: npt.NDArray[np.int64], dimensions: tuple[int, int]) -> str:
    """That corners of tiles, (N, 2) in level-0 pixels, lie outside the slide; empty if none do."""
    count = int(((coords < 0) | (coords >= np.array(dimensions))).any(axis=1).sum())
    return f"has {counted(count, 'tile')} whose corner is outside the slide" if count else ""


def _check(path: Path, attributes: Mapping[str, Any], shapes: Mapping[str, Any]) -> None:
    """Refuse a file that is not whole, not ours, or not readable by this version."""
    if attributes.get("format") != FORMAT:
        has = ", ".join(sorted(shapes)) or "nothing"
        raise OutputError(
            f"{path}: was not written by bioptimus: no attribute format = {FORMAT} (it has {has})"
        )
    version = attributes.get("format_version", 0)
    if version > FORMAT_VERSION:
        raise OutputError(
            f"{path}: has format version {version}, this bioptimus reads up to {FORMAT_VERSION}; "
            "install a newer one"
        )
    if not attributes.get("complete"):
        raise OutputError(f"{path}: is not complete; make it again with --overwrite")
    lacking = [f"dataset {name}" for name in REQUIRED_DATASETS if name not in shapes]
    lacking += [f"attribute {name}" for name in REQUIRED_ATTRIBUTES if name not in attributes]
    if lacking:
        raise OutputError(f"{path}: lacks the {', '.join(lacking)}; make it again")
    for name in _POSITIVE:
        value = attributes[name]
        if not (isinstance(value, int | float) and 0 < value < math.inf):
            raise OutputError(f"{path}: says {name} is {value}; make it again")
    if attributes["state"] not in ("ok", "empty"):
        raise OutputError(f"{path}: says its state is {attributes['state']}; make it again")
    try:
        _tile_of(attributes)
    except (TypeError, ValueError) as exc:
        raise OutputError(f"{path}: says nothing of its tiles ({exc}); make it again") from exc
    if attributes["mode"] not in set(InferenceMode) or not isinstance(
        attributes["model_spec"], Mapping
    ):
        raise OutputError(f"{path}: has a mode or model_spec that says nothing; make it again")


def _tile_of(attributes: Mapping[str, Any]) -> TileSpec:
    return TileSpec(
        size_px=int(attributes["tile_size_px"]),
        mpp=float(attributes["tile_mpp"]),
        overlap_px=int(attributes["overlap_px"]),
    )


def _check_datasets(path: Path, there: Mapping[str, h5py.Dataset]) -> None:
    """Refuse datasets of which no reader could make anything, or that do not fit each other."""
    lengths: dict[str, int] = {}
    for name, (axes, kinds) in _LAYOUT.items():
        if name not in there:
            continue
        found = there[name]
        shape: tuple[int, ...] = getattr(found, "shape", ())  # a group has none
        fits = len(shape) == axes and found.dtype.kind in kinds
        if name == "coords":
            fits = fits and shape[1] == 2
        if kinds == "OS":
            fits = fits and h5py.check_string_dtype(found.dtype) is not None
        if name == "failed_tiles":
            fits = fits and found.dtype.names == ("x", "y", "stage", "reason")
        if name in ("thumbnail", "tissue_mask"):
            fits = fits and min(shape) > 0 and shape[2:] in ((), (3,))
        if not fits:
            what = f"{found.dtype} {shape}" if shape else "no array"
            raise OutputError(f"{path}: holds {what} as {name}; make it again")
        if name in ("thumbnail", "tissue_mask"):
            scale = np.asarray(found.attrs.get("downsample", ()))
            if scale.shape != (2,) or not (np.isfinite(scale) & (scale > 0)).all():
                said = scale.tolist() or "nothing"
                raise OutputError(f"{path}: says {said} as downsample of {name}; make it again")
        lengths[name] = shape[0]
    names, values = lengths.get("output_names"), there.get("predictions")
    if names and values is not None and names != values.shape[1]:
        raise OutputError(
            f"{path}: has {counted(names, 'name')} for {values.shape[1]} predicted values; make it "
            "again"
        )
    count = lengths["coords"]
    for name in ("features", "predictions", "tissue_ratios", ROW_CHECKSUMS):
        if lengths.get(name, count) != count:
            raise OutputError(
                f"{path}: {lengths[name]} rows of {name} for {count} of coords; make it again"
            )


def _decoded(text: Any) -> str:
    """Text as h5py gives it: names that are no UTF-8, and values, are bytes."""
    # As h5py writes text that is no UTF-8, such as that of odd file names.
    return text.decode(errors="surrogateescape") if isinstance(text, bytes) else str(text)


def _attributes(object_: h5py.Group | h5py.Dataset) -> dict[str, Any]:
    return {_decoded(key): _plain(value) for key, value in object_.attrs.items()}


def _plain(value: Any) -> Any:
    """An attribute as a plain Python value; text that is a JSON mapping as a dict."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, str) and value.startswith("{"):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value
