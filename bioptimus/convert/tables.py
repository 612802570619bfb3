"""Plain arrays and tables: NPZ, Zarr, Parquet."""

import json
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bioptimus.convert.pieces import ConvertOptions, Piece, missing_package
from bioptimus.inference.layout import to_json
from bioptimus.inference.results import Result, RowsName

if TYPE_CHECKING:
    import pyarrow

_ROWS_AT_ONCE = 8192
_CHUNK_BYTES = 1 << 20


def npz(result: Result, relative: PurePath, _: ConvertOptions) -> list[Piece]:
    """One NumPy archive, readable without pickle."""
    return [Piece(path=relative.with_suffix(".npz"), write=lambda path: _write_npz(result, path))]


def _write_npz(result: Result, path: Path) -> None:
    arrays: dict[str, npt.NDArray[Any]] = {name: result.read(name) for name in rows_of(result)}
    arrays["coords_um"] = result.coords_um
    arrays["output_names"] = np.array(result.output_names, dtype=np.str_)
    arrays["attributes"] = np.array(to_json(result.attributes))
    for name, picture in (("thumbnail", result.thumbnail), ("tissue_mask", result.tissue_mask)):
        if picture is not None:
            arrays[name] = picture.pixels
            arrays[f"{name}_downsample"] = np.array(picture.downsample)
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)


def rows_of(result: Result) -> list[RowsName]:
    """Names of the datasets that hold a row per tile."""
    names: list[RowsName] = ["coords", "tissue_ratios"]
    if result.embedding_dim:
        names.append("features")
    if result.prediction_dim:
        names.append("predictions")
    return names


def zarr(result: Result, relative: PurePath, _: ConvertOptions) -> list[Piece]:
    """One Zarr group (format 2, which every reader knows) with the result's own names."""
    try:
        import zarr as _zarr  # noqa: F401
    except ImportError as exc:
        raise missing_package("Zarr", "zarr", "zarr") from exc
    return [
        Piece(
            path=relative.with_suffix(".zarr"),
            write=lambda path: _write_zarr(result, path),
            is_folder=True,
        )
    ]


def _write_zarr(result: Result, path: Path) -> None:
    import zarr as zarr_package

    group = zarr_package.open_group(str(path), mode="w-", zarr_format=2)
    for name in rows_of(result):
        sample = result.read(name, 0, 1)
        shape = (len(result), *sample.shape[1:])
        width = max(1, sample.dtype.itemsize * int(np.prod(shape[1:])))
        step = max(1, _CHUNK_BYTES // width)
        chunks = (max(1, min(step, len(result))), *shape[1:])
        array = group.create_array(name, shape=shape, dtype=sample.dtype, chunks=chunks)
        for first in range(0, len(result), chunks[0]):
            rows = result.read(name, first, first + chunks[0])
            array[first : first + len(rows)] = rows
    pictures = {"thumbnail": result.thumbnail, "tissue_mask": result.tissue_mask}
    for picture_name, picture in pictures.items():
        if picture is not None:
            array = group.create_array(picture_name, data=picture.pixels)
            array.attrs["downsample"] = list(picture.downsample)
    group.attrs.update(json.loads(to_json(result.attributes)))
    group.attrs["output_names"] = list(result.output_names)
    group.attrs["input_gene_names"] = list(result.input_gene_names)


def parquet(result: Result, relative: PurePath, _: ConvertOptions) -> list[Piece]:
    """One table with a row per tile: position, predictions by name, the embedding as a list."""
    try:
        import pyarrow.parquet as _pyarrow  # noqa: F401
    except ImportError as exc:
        raise missing_package("Parquet", "pyarrow", "parquet") from exc
    return [
        Piece(path=relative.with_suffix(".parquet"), write=lambda path: _write_table(result, path))
    ]


def _write_table(result: Result, path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    batches = _batches(result)
    first = next(batches)
    with pyarrow.parquet.ParquetWriter(path, first.schema, compression="zstd") as writer:
        writer.write_batch(first)
        for batch in batches:
            writer.write_batch(batch)


def _batches(result: Result) -> Iterator["pyarrow.RecordBatch"]:
    """At least one batch, also of an empty result: its schema is needed."""
    import pyarrow

    for first in range(0, max(1, len(result)), _ROWS_AT_ONCE):
        last = min(first + _ROWS_AT_ONCE, len(result))
        place = slice(first, last)
        coords = result.coords[place]
        columns: dict[str, Any] = {
            "x": coords[:, 0],
            "y": coords[:, 1],
            "x_um": coords[:, 0] * result.mpp[0],
            "y_um": coords[:, 1] * result.mpp[1],
            "tissue_ratio": result.tissue_ratios[place],
        }
        taken = {*columns, "embedding"}
        if result.prediction_dim:
            values = result.read("predictions", first, last).astype(np.float32, copy=False)
            for index, name in enumerate(result.output_names):
                column = f"prediction_{name}" if name in taken else name
                columns[column] = np.ascontiguousarray(values[:, index])
        if result.embedding_dim:
            values = result.read("features", first, last).astype(np.float32, copy=False)
            columns["embedding"] = pyarrow.FixedSizeListArray.from_arrays(
                pyarrow.array(values.ravel()), result.embedding_dim
            )
        batch = pyarrow.RecordBatch.from_pydict(
            {name: pyarrow.array(values) for name, values in columns.items()}
        )
        metadata = {"bioptimus": to_json(result.attributes)}
        yield batch.replace_schema_metadata(metadata)
