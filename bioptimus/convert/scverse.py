"""AnnData and SpatialData, for scanpy, squidpy and napari."""

import warnings
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from bioptimus.convert.pieces import ConvertOptions, Piece, missing_package
from bioptimus.inference.results import Result

_REGION = "tiles"


def h5ad(result: Result, relative: PurePath, _: ConvertOptions) -> list[Piece]:
    """One AnnData file; see :meth:`bioptimus.inference.results.Result.to_anndata`."""
    try:
        import anndata as _anndata  # noqa: F401
    except ImportError as exc:
        raise missing_package("AnnData", "anndata", "anndata") from exc
    return [
        Piece(
            path=relative.with_suffix(".h5ad"),
            write=lambda path: _write_h5ad(result, path),
        )
    ]


def _write_h5ad(result: Result, path: Path) -> None:
    """By way of memory: where a disk is full, the HDF5 library ends the process."""
    import h5py
    from anndata.io import write_elem

    with h5py.File(path.name, "w", driver="core", backing_store=False) as file:
        write_elem(file, "/", result.to_anndata())
        file.flush()
        path.write_bytes(file.id.get_file_image())


def spatialdata(result: Result, relative: PurePath, _: ConvertOptions) -> list[Piece]:
    """One SpatialData store: the thumbnail, the tiles as squares, and their table.

    The coordinate system ``global`` is level-0 pixels, ``um`` is µm.
    """
    try:
        import spatialdata as _spatialdata  # noqa: F401
    except ImportError as exc:
        raise missing_package("SpatialData", "spatialdata", "spatialdata") from exc
    return [
        Piece(
            path=relative.with_suffix(".spatialdata.zarr"),
            write=lambda path: _write_spatialdata(result, path),
            is_folder=True,
        )
    ]


def _write_spatialdata(result: Result, path: Path) -> None:
    import spatialdata as package
    from spatialdata.models import Image2DModel, ShapesModel, TableModel
    from spatialdata.transformations import Identity, Scale

    images: dict[str, Any] = {}
    if result.thumbnail is not None:
        downsample = np.array(result.thumbnail.downsample)
        images["thumbnail"] = Image2DModel.parse(
            result.thumbnail.pixels,
            dims=("y", "x", "c"),
            c_coords=["r", "g", "b"],
            transformations={
                "global": Scale(downsample.tolist(), axes=("x", "y")),
                "um": Scale((downsample * result.mpp).tolist(), axes=("x", "y")),
            },
        )
    store = package.SpatialData(images=images)
    # SpatialData has no shapes of no rows: an empty slide is its picture alone.
    if len(result):
        transformations = {"global": Identity(), "um": Scale(list(result.mpp), axes=("x", "y"))}
        store[_REGION] = ShapesModel.parse(_squares(result), transformations=transformations)
        table = result.to_anndata()
        # The picture stands in the store itself; the table is keyed to the squares.
        table.uns = {"bioptimus": table.uns["bioptimus"]}
        table.obs["region"] = _category(_REGION, len(result))
        table.obs["tile"] = np.arange(len(result))
        store[f"{_REGION}_table"] = TableModel.parse(
            table, region=_REGION, region_key="region", instance_key="tile"
        )
    with warnings.catch_warnings():
        # About the format of its own files, which is the package's to choose.
        warnings.simplefilter("ignore")
        store.write(path)


def _category(name: str, count: int) -> Any:
    import pandas

    return pandas.Categorical([name] * count, categories=[name])


def _squares(result: Result) -> Any:
    import geopandas
    import shapely

    low = result.coords
    high = low + np.array(result.tile_level0)
    boxes = shapely.box(low[:, 0], low[:, 1], high[:, 0], high[:, 1])
    return geopandas.GeoDataFrame(
        {"tissue_ratio": result.tissue_ratios}, geometry=boxes, index=np.arange(len(result))
    )
