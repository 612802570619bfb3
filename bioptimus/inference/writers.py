"""Result files: rows go to ``x.h5.part`` in any order, a whole ``x.h5`` appears at the end.

At every moment, also inside :meth:`HDF5Writer.open` and :meth:`HDF5Writer.finish`, a kill leaves
either no part or one that the next run continues, and never a half file under the final name.
One process writes a file at a time; claims see to that (``bioptimus.batch``).
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, Self

import numpy as np
import numpy.typing as npt

from bioptimus.counting import counted
from bioptimus.errors import OutputError, OutputMismatchError
from bioptimus.inference.checksums import row_checksums
from bioptimus.inference.disk import (
    is_gone,
    output_errors,
    refuse_folder,
    retry,
    temporaries_beside,
)
from bioptimus.inference.hdf5_image import (
    FAILED_TILES_DTYPE,
    HDF5Image,
    PackedArray,
    damage_told,
    open_to_read,
    pack,
)
from bioptimus.inference.layout import (
    FORMAT,
    FORMAT_VERSION,
    PART_SUFFIX,
    ROW_CHECKSUMS,
    STORED_TYPES,
    WRITER_ATTRIBUTES,
    AttributeValue,
    differences,
)
from bioptimus.inference.part import (
    PENDING,
    OtherRows,
    PartFile,
    RowLayout,
    coords_crc,
    rows_of_others,
)
from bioptimus.inference.results import open_result

_log = logging.getLogger(__name__)

# Root attributes that tell whether a file need be made again, and how many tiles it has.
_TELLING = (
    "format",
    "complete",
    "digest",
    "digest_parameters",
    "tiles_planned",
    "tiles_failed",
)

RowState = Literal["ok", "empty"]


@dataclass(frozen=True, kw_only=True, eq=False)
class FilePlan:
    """Everything about a result file that is known before the first row.

    Attributes:
        coords: (N, 2) int64, x and y of each planned tile's corner, level-0 pixels.
        tissue_ratios: (N,) float32, share of each tile that is tissue.
        embedding_dim: Values per embedding; 0 leaves ``features`` out.
        prediction_dim: Values per prediction; 0 leaves ``predictions`` out.
        dtype: How both are stored.
        output_names: Names of the predicted values; empty, or ``prediction_dim`` of them.
        input_gene_names: Genes of the bulk RNA that went in; empty if none.
        attributes: Root attributes; mappings become JSON text.
        coords_attributes: Attributes of ``coords``.
        thumbnail: (H, W, 3) uint8.
        thumbnail_downsample: (x, y) level-0 pixels per thumbnail pixel.
        tissue_mask: (H, W) uint8, 0 or 1.
        tissue_mask_downsample: (x, y) level-0 pixels per mask pixel.
        digest: Names everything the rows depend on: slide, model, parameters.
        digest_parameters: What the digest was made of, to say what differs.
    """

    coords: npt.NDArray[np.int64]
    tissue_ratios: npt.NDArray[np.float32]
    embedding_dim: int = 0
    prediction_dim: int = 0
    dtype: Literal["float32", "float16"] = "float32"
    output_names: tuple[str, ...] = ()
    input_gene_names: tuple[str, ...] = ()
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    coords_attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    thumbnail: npt.NDArray[np.uint8] | None = None
    thumbnail_downsample: tuple[float, float] = (1.0, 1.0)
    tissue_mask: npt.NDArray[np.uint8] | None = None
    tissue_mask_downsample: tuple[float, float] = (1.0, 1.0)
    digest: str
    digest_parameters: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check that the parts agree.

        Raises:
            OutputError: They do not.
        """
        count = len(self.coords)
        if self.coords.shape != (count, 2) or self.coords.dtype != np.int64:
            raise OutputError(f"coords are {_kind(self.coords)}, not int64 (N, 2)")
        if self.tissue_ratios.shape != (count,):
            raise OutputError(f"tissue ratios are {_kind(self.tissue_ratios)} for {count} tiles")
        if self.dtype not in STORED_TYPES:
            raise OutputError(f"rows of {self.dtype}, not of {' or '.join(STORED_TYPES)}")
        if self.output_names and len(self.output_names) != self.prediction_dim:
            raise OutputError(
                f"{len(self.output_names)} output names for {self.prediction_dim} values"
            )
        if taken := WRITER_ATTRIBUTES & set(self.attributes):
            raise OutputError(f"the writer sets the attributes {', '.join(sorted(taken))} itself")

    @property
    def columns(self) -> dict[str, int]:
        """Dataset → values per row, of those that the file has."""
        dims = {"features": self.embedding_dim, "predictions": self.prediction_dim}
        return {name: dim for name, dim in dims.items() if dim}

    @property
    def row_layout(self) -> RowLayout:
        """What the part file must have room for."""
        return RowLayout(
            rows=len(self.coords),
            columns=self.columns,
            dtype=self.dtype,
            coords_crc=coords_crc(self.coords),
        )


class PredictionWriter(Protocol):
    """Where the pipeline puts rows. One thread writes."""

    resumed_rows: int

    def pending(self) -> npt.NDArray[np.int64]:
        """Numbers of the rows still to do, ascending."""

    def write_rows(
        self,
        rows: npt.NDArray[np.int64],
        *,
        embeddings: npt.NDArray[np.floating[Any]] | None,
        predictions: npt.NDArray[np.floating[Any]] | None,
    ) -> None:
        """Take rows, in any order."""

    def fail_tile(self, row: int, *, stage: str, reason: str) -> None:
        """Record that a tile has no row, and why."""

    def flush(self) -> None:
        """Return when the rows taken so far would survive a loss of power."""

    def finish(
        self, *, state: RowState, attributes: Mapping[str, AttributeValue] | None = None
    ) -> Path:
        """Make the whole file appear under its name."""

    def close(self) -> None:
        """Stop, leaving what a later run needs to go on."""


class HDF5Writer:
    """Writes one result file. A context manager; leaving it early keeps the part.

    Owner: one thread. Attributes may be read from others.

    Attributes:
        path: Final name.
        resumed_rows: Rows that an earlier run had done.
        started_anew_because: Why a part that was there could not be continued, or None.
    """

    def __init__(self, path: Path, plan: FilePlan, part: PartFile) -> None:
        """Use :meth:`open`."""
        self.path = path
        self.started_anew_because: str | None = None
        self._plan = plan
        self._part = part
        self._failed: dict[int, tuple[str, str]] = {}
        self._pictures: dict[str, PackedArray] | None = None
        self.resumed_rows = part.rows_done
        self._told_of_part = False

    @classmethod
    def open(cls, path: Path, plan: FilePlan, *, overwrite: bool = False) -> Self:
        """Continue the part of this file, or start one.

        Tiles that failed in the earlier run are tried again.

        Args:
            path: Final name, ``.../x.h5``; its folder is made if missing.
            plan: The file.
            overwrite: Start anew where the part holds rows made with other parameters.

        Raises:
            OutputMismatchError: The part holds such rows, and they are not to be overwritten.
            OutputError: The folder cannot be made or written, or another is in the file's place.
        """
        _refuse_folders(path)
        part_path = part_of(path)
        digest, parameters = plan.digest, plan.digest_parameters
        with output_errors(path, "cannot start it", advice="choose another --out"):
            path.parent.mkdir(parents=True, exist_ok=True)
            if part_path.exists():
                for leftover in temporaries_beside(path):
                    leftover.unlink(missing_ok=True)
            layout = plan.row_layout
            found = retry(
                lambda: PartFile.resume(part_path, layout, digest=digest, parameters=parameters),
                name=path.name,
            )
            if isinstance(found, PartFile):
                return cls(path, plan, found)
            if isinstance(found, OtherRows):
                if not overwrite:
                    raise _made_otherwise(part_path, found)
                found = found.differences
            part = retry(
                lambda: PartFile.create(part_path, layout, digest=digest, parameters=parameters),
                name=path.name,
            )
        writer = cls(path, plan, part)
        writer.started_anew_because = found
        return writer

    def pending(self) -> npt.NDArray[np.int64]:
        """Numbers of the rows still to do, ascending, int64."""
        left = self._part.state == PENDING
        left[list(self._failed)] = False
        return np.flatnonzero(left).astype(np.int64)

    def write_rows(
        self,
        rows: npt.NDArray[np.int64],
        *,
        embeddings: npt.NDArray[np.floating[Any]] | None,
        predictions: npt.NDArray[np.floating[Any]] | None,
    ) -> None:
        """Write rows; after this they survive the death of the process.

        Args:
            rows: (n,) row numbers in the plan's order, each once, in any order.
            embeddings: (n, embedding_dim), or None where the plan has none.
            predictions: (n, prediction_dim), or None where the plan has none.

        Raises:
            OutputError: A value is NaN or infinite (or is so as float16), the shapes are not the
                plan's, or the disk refuses. Nothing of a refused call counts as done.
        """
        if not len(rows):
            return
        order = np.argsort(rows, kind="stable")
        ordered = np.asarray(rows, np.int64)[order]
        self._check_rows(ordered)
        given = {"features": embeddings, "predictions": predictions}
        values = {
            name: self._checked(name, block, rows)[order]
            for name, block in given.items()
            if block is not None or name in self._plan.columns
        }
        with self._errors("cannot write rows"):
            self._part.write_rows(ordered, values)

    def fail_tile(self, row: int, *, stage: str, reason: str) -> None:
        """Record that a tile has no row: it goes to ``failed_tiles`` when the file is finished.

        Args:
            row: Row number in the plan's order.
            stage: ``read``, ``request`` or ``output``: where.
            reason: The error's words.
        """
        self._check_rows(np.array([row], np.int64))
        self._failed[int(row)] = (stage, reason)

    def flush(self) -> None:
        """Return when the rows written so far would survive a loss of power.

        Raises:
            OutputError: The disk refuses, and the rows since the last flush are pending again; or
                the folder is there no more, and nothing could be written under the final name.
        """
        with self._errors("cannot flush"):
            self._part.flush()
        self._require_folder()
        if not self._told_of_part and is_gone(self._part.path):
            # Its rows can still be read here, and become the file.
            self._told_of_part = True
            _log.warning(
                "%s: was removed by somebody; the file is made all the same, but a run that is "
                "stopped before computes its tiles again",
                self._part.path,
            )

    def pack_pictures(self) -> None:
        """Compress the pictures, so that :meth:`finish` need not; allowed on any thread."""
        self._pictures = self._packed_pictures()

    def finish(
        self, *, state: RowState, attributes: Mapping[str, AttributeValue] | None = None
    ) -> Path:
        """Write the whole file beside the part, rename it to its name, remove the part.

        Args:
            state: ``empty`` for a slide without tissue, else ``ok``.
            attributes: Root attributes known only now; they win over the plan's.

        Returns:
            The final name.

        Raises:
            OutputError: Rows are missing, or the disk refuses; the part stays.
        """
        if len(left := self.pending()):
            raise OutputError(
                f"{self.path}: {len(left)} of {len(self._plan.coords)} rows are missing"
            )
        if taken := WRITER_ATTRIBUTES & set(attributes or {}):
            raise OutputError(f"the writer sets the attributes {', '.join(sorted(taken))} itself")
        self._require_folder()
        with self._errors("cannot finish it"):
            retry(lambda: self._write_final(state, attributes or {}), name=self.path.name)
            if self._part.is_current():
                self._part.path.unlink(missing_ok=True)
        self.close()
        return self.path

    def close(self) -> None:
        """Stop; the part stays and a later run continues it. Again is allowed."""
        self._part.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_rows(self, rows: npt.NDArray[np.int64]) -> None:
        count = len(self._plan.coords)
        if rows[0] < 0 or rows[-1] >= count:
            raise OutputError(f"{self.path}: row {rows[0]} to {rows[-1]} of {count}")
        if (np.diff(rows) == 0).any():
            raise OutputError(f"{self.path}: a row is given twice in one call")

    def _checked(
        self, name: str, block: npt.NDArray[np.floating[Any]] | None, rows: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.floating[Any]]:
        """The block as it will be stored, if it may be."""
        wanted = (len(rows), self._plan.columns.get(name, 0))
        if block is None or block.shape != wanted:
            found = "nothing" if block is None else str(block.shape)
            raise OutputError(f"{self.path}: {name} of shape {found}, not {wanted}")
        with np.errstate(over="ignore"):
            stored = block.astype(self._plan.dtype, copy=False)
        finite = np.isfinite(stored)
        if not finite.all():
            place = int(np.flatnonzero(~finite.all(axis=1))[0])
            row = int(rows[place])
            if np.isfinite(block[place]).all():
                raise OutputError(
                    f"{self.path}: {name} of row {row} are too large for float16; "
                    "use --dtype float32"
                )
            raise OutputError(f"{self.path}: {name} of row {row} hold NaN or Inf")
        return stored

    def _packed_pictures(self) -> dict[str, PackedArray]:
        pictures = {"thumbnail": self._plan.thumbnail, "tissue_mask": self._plan.tissue_mask}
        return {name: pack(picture) for name, picture in pictures.items() if picture is not None}

    def _require_folder(self) -> None:
        """Refuse to go on where all that is written is lost, or in a folder elsewhere by now.

        Raises:
            OutputError: The folder was removed, moved, or its disk unmounted.
        """
        if is_gone(self.path.parent):
            raise OutputError(
                f"{self.path}: its folder is there no more; was it removed, moved or unmounted? "
                f"what was computed is in its {self._part.path.name}: put it back if you can, and "
                "run again"
            )

    def _errors(self, doing: str) -> Any:
        advice = f"what was computed is in {self._part.path.name}; run again to go on"
        return output_errors(self.path, doing, advice=advice)

    def _write_final(self, state: RowState, attributes: Mapping[str, AttributeValue]) -> None:
        kept = np.setdiff1d(
            np.arange(len(self._plan.coords), dtype=np.int64),
            np.array(list(self._failed), np.int64),
            assume_unique=True,
        )
        image = self._image(kept, state, attributes)
        sums = np.zeros(len(kept), np.uint32)

        def rows(name: str, first: int, last: int) -> npt.NDArray[Any]:
            # Asked for last, when all the others have passed by.
            if name == ROW_CHECKSUMS:
                return sums[first:last]
            block = self._part.read_rows(name, kept[first:last])
            sums[first:last] = row_checksums(block, sums[first:last])
            return block

        image.save(self.path, rows)

    def _image(
        self,
        kept: npt.NDArray[np.int64],
        state: RowState,
        attributes: Mapping[str, AttributeValue],
    ) -> HDF5Image:
        plan = self._plan
        failed = [(*plan.coords[row].tolist(), *self._failed[row]) for row in sorted(self._failed)]
        with HDF5Image(checksums=True) as image:
            for name, columns in plan.columns.items():
                image.add_rows(name, shape=(len(kept), columns), dtype=plan.dtype)
            image.add_rows(ROW_CHECKSUMS, shape=(len(kept),), dtype="uint32")
            image.add_array("coords", plan.coords[kept])
            image.set_attributes(plan.coords_attributes, dataset="coords")
            image.add_array("tissue_ratios", plan.tissue_ratios[kept].astype(np.float32))
            image.add_names("output_names", plan.output_names)
            image.add_names("input_gene_names", plan.input_gene_names)
            image.add_array("failed_tiles", np.array(failed, FAILED_TILES_DTYPE))
            downsamples = {
                "thumbnail": plan.thumbnail_downsample,
                "tissue_mask": plan.tissue_mask_downsample,
            }
            for name, picture in (self._pictures or self._packed_pictures()).items():
                image.add_packed(name, picture)
                image.set_attributes({"downsample": list(downsamples[name])}, dataset=name)
            image.set_attributes({**plan.attributes, **attributes})
            image.set_attributes(
                {
                    "format": FORMAT,
                    "format_version": FORMAT_VERSION,
                    "state": state,
                    "digest": plan.digest,
                    "digest_parameters": plan.digest_parameters,
                    "tiles_planned": len(plan.coords),
                    "tiles_failed": len(failed),
                    "complete": True,
                }
            )
        return image


def part_of(path: Path) -> Path:
    """Name of the unfinished file that belongs to a final name."""
    return path.with_name(path.name + PART_SUFFIX)


def _refuse_folders(path: Path) -> None:
    for each in (path, part_of(path)):
        refuse_folder(each)


def _made_otherwise(part: Path, found: OtherRows) -> OutputMismatchError:
    return OutputMismatchError(
        f"{part}: holds {counted(found.rows, 'row')} of a stopped run that was asked for something "
        f"else ({found.differences}); repeat that command to go on with it, or pass --overwrite "
        "to start anew, or another --out"
    )


def look_at_part(path: Path, plan: FilePlan, *, overwrite: bool = False) -> int | str | None:
    """See what :meth:`HDF5Writer.open` would make of the part of a file; changes nothing.

    Returns:
        How many rows it would not make again; None where there is no part; a reason why it would
        start anew.

    Raises:
        OutputMismatchError: It holds rows made with other parameters, and they are not to be
            overwritten.
        OutputError: The part cannot be opened, or a folder is in the file's place or the part's.
    """
    _refuse_folders(path)
    with output_errors(path, "cannot start it", advice="choose another --out"):
        found = retry(
            lambda: PartFile.look_at(
                part_of(path),
                plan.row_layout,
                digest=plan.digest,
                parameters=plan.digest_parameters,
            ),
            name=path.name,
        )
    if isinstance(found, OtherRows):
        if not overwrite:
            raise _made_otherwise(part_of(path), found)
        return found.differences
    if not isinstance(found, PartFile):
        return found
    found.close()
    return found.rows_done


@dataclass(frozen=True, kw_only=True)
class Existing:
    """A finished file that need not be made again.

    Attributes:
        tiles_planned: Its rows and failed tiles.
        tiles_failed: Those that have no row.
    """

    tiles_planned: int
    tiles_failed: int


def check_existing(
    path: Path, *, digest: str, digest_parameters: Mapping[str, Any], whole: bool = False
) -> Existing | None:
    """See whether a finished file is there, and tidy up beside it.

    A part beside it is what a kill between rename and removal left, and goes; not one with rows of
    other parameters, which a stopped run with ``--overwrite`` left. Returns and raises as
    :func:`look_at_existing`.
    """
    found = look_at_existing(path, digest=digest, digest_parameters=digest_parameters, whole=whole)
    if found is None:
        return None
    advice = "remove the .part by hand"
    with output_errors(path, "cannot tidy up beside it", advice=advice):
        part = part_of(path)
        if part.exists():
            left = list(temporaries_beside(path))
            # A folder of that name is nobody's part.
            if not part.is_dir() and rows_of_others(part, digest_parameters) is None:
                left.append(part)
            for leftover in left:
                leftover.unlink(missing_ok=True)
    return found


def look_at_existing(
    path: Path, *, digest: str, digest_parameters: Mapping[str, Any], whole: bool = False
) -> Existing | None:
    """See whether a finished file is there and made from the same inputs; changes nothing.

    Args:
        path: Final name.
        digest: Of what the file would be made from now.
        digest_parameters: What that is.
        whole: Read every value, to be sure that none is damaged.

    Returns:
        None where there is no file; what is there, where it need not be made again.

    Raises:
        OutputMismatchError: It was made from something else; the message says what differs.
        OutputError: It is unreadable, incomplete, damaged, or was not written by this package.
    """
    refuse_folder(path)
    advice = "move it away or pass --overwrite"
    with damage_told(path, advice=f"it is damaged: {advice}"):
        try:
            found = retry(lambda: _root_attributes(path), name=path.name)
        except FileNotFoundError:
            return None
    if found.get("format") != FORMAT:
        raise OutputError(f"{path}: was not written by bioptimus; {advice}")
    if not found.get("complete", False):
        raise OutputError(f"{path}: is not complete; {advice}")
    if found.get("digest") != digest:
        words = differences(_mapping(found.get("digest_parameters")), digest_parameters)
        raise OutputMismatchError(
            f"{path}: was made from something else ({words or 'its digest is another'}); "
            "pass --overwrite or another --out"
        )
    if whole:
        open_result(path).check(rows=True)
    return Existing(
        tiles_planned=int(found.get("tiles_planned", 0)),
        tiles_failed=int(found.get("tiles_failed", 0)),
    )


def _root_attributes(path: Path) -> dict[str, Any]:
    with open_to_read(path) as file:
        # Of thirty: each takes HDF5 a tenth of a millisecond, and a run may look at 100,000 files.
        there = file.attrs
        return {name: there[name] for name in _TELLING if name in there}


def _mapping(text: object) -> dict[str, Any]:
    try:
        found = json.loads(text) if isinstance(text, str) else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _kind(array: npt.NDArray[Any]) -> str:
    return f"{array.dtype} {array.shape}"
