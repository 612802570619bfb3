"""What a slide's result is made from, and what its file says about that.

Two runs whose :func:`digest_parameters` agree make the same file. What else the file tells, such as
names and versions, may differ between them.
"""

import hashlib
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bioptimus import __version__
from bioptimus.errors import CheckpointError, TissueError, UsageError
from bioptimus.inference.layout import digest_of
from bioptimus.inference.writers import FilePlan
from bioptimus.io.wsi import CoarseImage, OpenOptions, Slide
from bioptimus.jobs import SlideJob, SlideOptions
from bioptimus.models.types import ModelSpec
from bioptimus.omics import BulkRNA, read_bulk_rna
from bioptimus.planning import PlanOptions, SlidePlan
from bioptimus.runtime.archive import file_sha256
from bioptimus.tissue import SEARCH_VERSION

if TYPE_CHECKING:
    from bioptimus.runtime.server_model import BaseServerModel

# The 10 of "magnification = 10 / mpp": a 10x objective gives about 1 µm per pixel.
_MAGNIFICATION_TIMES_MPP = 10.0
# Closer than this, a tile is at the model's own scale: scanners vary as much.
_SAME_SCALE_TOLERANCE = 0.02


def slide_rna(job: SlideJob, spec: ModelSpec, options: SlideOptions) -> BulkRNA | None:
    """Read the bulk RNA of a slide; None for models that read none.

    Raises:
        UsageError: There is no table, or it does not fit the model.
    """
    if job.bulk_rna is None:
        if spec.rna_dim:
            raise UsageError(
                f"{job.name}: {spec.name} reads bulk RNA; pass --bulk-rna, or a bulk_rna column"
            )
        return None
    if not spec.rna_dim:
        return None  # a list may serve several models; the run says so once
    return read_bulk_rna(
        job.bulk_rna, spec, gene_column=options.gene_column, value_column=options.value_column
    )


def job_options(job: SlideJob, options: SlideOptions) -> tuple[OpenOptions, PlanOptions]:
    """The run's options with what the input table says about one slide."""
    opening, planning = options.opening.with_column(job.mpp), options.plan
    if job.mask is not None:
        planning = replace(planning, tissue=str(job.mask))
    return opening, planning


def scale_warning(planning: PlanOptions, spec: ModelSpec) -> str | None:
    """Tiles at another scale than the model was made for, told in one sentence; None if at its."""
    wanted, made_for = planning.applied_to(spec.tile).mpp, spec.tile.mpp
    if abs(wanted / made_for - 1) <= _SAME_SCALE_TOLERANCE:
        return None
    return (
        f"tiles at {wanted:g} µm/px, but {spec.name} was made for {made_for:g} µm/px: what it "
        "makes of them may be worth little; leave out --tile-mpp for the model's own scale"
    )


def digest_parameters(
    slide: Slide,
    spec: ModelSpec,
    model_sha256: str,
    options: SlideOptions,
    planning: PlanOptions,
    bulk_rna: npt.NDArray[np.float32] | None,
) -> dict[str, Any]:
    """What a result file depends on: two runs that agree here make the same file.

    The slide counts by content (size and quickhash), not by path or date. The reader does not
    count, since readers must not differ in a pixel.

    Returns:
        JSON-ready values with names that a message can show.
    """
    mask_given = planning.tissue not in ("auto", "none")
    # A mask counts by its content, not by its path.
    tissue = "mask" if mask_given else planning.tissue
    within = mask_given and planning.search_in_mask
    searched = {"tissue search version": SEARCH_VERSION} if within or tissue == "auto" else {}
    return {
        "slide size (bytes)": slide.size_bytes,
        "slide quickhash": slide.quickhash,
        "mpp": [round(value, 6) for value in slide.mpp],
        "model": spec.name,
        **run_parameters(spec, model_sha256, options),
        "min tissue": planning.min_tissue,
        "tissue": tissue,
        **searched,
        **({"search in mask": True} if within else {}),
        **({"tissue class": sorted(set(planning.tissue_class))} if planning.tissue_class else {}),
        "tissue mask sha256": _mask_sha256(Path(planning.tissue)) if mask_given else "",
        "keep pen": planning.keep_pen,
        # The values, not their file: a table may hold a column for each sample.
        "bulk RNA sha256": "" if bulk_rna is None else hashlib.sha256(bulk_rna.data).hexdigest(),
    }


def run_parameters(spec: ModelSpec, model_sha256: str, options: SlideOptions) -> dict[str, Any]:
    """What of :func:`digest_parameters` is the same for every slide of a run."""
    tile = options.plan.applied_to(spec.tile)
    return {
        "model sha256": model_sha256,
        "mode": str(options.mode),
        "tile size (px)": tile.size_px,
        "tile mpp": tile.mpp,
        "overlap (px)": tile.overlap_px,
        "icc": options.opening.icc,
        "dtype": options.dtype,
    }


def _mask_sha256(path: Path) -> str:
    try:
        return file_sha256(path)
    except CheckpointError as exc:
        # It speaks of the file as of a model.
        raise TissueError(f"mask {exc}") from exc


def rows_plan(
    plan: SlidePlan,
    spec: ModelSpec,
    options: SlideOptions,
    *,
    digest: str,
    parameters: Mapping[str, Any],
) -> FilePlan:
    """The rows of a slide's file, without what describes them.

    A part is continued or not by this alone.
    """
    mode = options.mode
    return FilePlan(
        coords=plan.coords,
        tissue_ratios=plan.tissue_ratios,
        embedding_dim=spec.embedding_dim if mode.wants_embedding else 0,
        prediction_dim=spec.prediction_dim if mode.wants_prediction else 0,
        dtype=options.dtype,
        output_names=spec.output_names if mode.wants_prediction else (),
        input_gene_names=spec.input_genes,
        digest=digest,
        digest_parameters=parameters,
    )


def file_plan(
    slide: Slide,
    plan: SlidePlan,
    thumbnail: CoarseImage,
    model: "BaseServerModel",
    options: SlideOptions,
    planning: PlanOptions,
    job: SlideJob,
    parameters: dict[str, Any],
    warnings: Sequence[str],
) -> FilePlan:
    """All of a slide's file but its rows' values: their places, what describes them, pictures."""
    spec = model.model_spec
    tile = plan.spec
    return replace(
        rows_plan(plan, spec, options, digest=digest_of(parameters), parameters=parameters),
        attributes={
            "slide_path": str(job.path.absolute()),
            "slide_name": slide.name,
            "slide_size_bytes": slide.size_bytes,
            "slide_vendor": slide.vendor,
            "slide_quickhash": slide.quickhash,
            "slide_width": slide.dimensions[0],
            "slide_height": slide.dimensions[1],
            "slide_has_icc": slide.has_icc,
            # What was done, where the digest has what was asked for.
            "icc": "srgb" if slide.icc_applied else "none",
            "mpp_x": slide.mpp[0],
            "mpp_y": slide.mpp[1],
            "mpp_source": slide.resolution.source,
            "objective_power": slide.objective_power or 0.0,
            "reader": slide.reader,
            "model_name": model.model_name,
            "model_sha256": model.checkpoint_sha256,
            # These two change what rounding makes of the rows, not what they are made from.
            "hardware": model.hardware,
            "compiled": model.is_compiled,
            # Names stand in their own datasets: an HDF5 attribute holds at most 64 KiB.
            "model_spec": spec.with_(output_names=(), input_genes=()).to_dict(),
            "mode": str(options.mode),
            "tile_size_px": tile.size_px,
            "tile_mpp": tile.mpp,
            "overlap_px": tile.overlap_px,
            "min_tissue": planning.min_tissue,
            "tissue_method": plan.mask.method,
            "warnings": list(warnings),
            "versions": library_versions(),
        },
        coords_attributes={
            "patch_size": tile.size_px,
            "patch_size_level0": round(plan.grid.tile_level0[0]),
            "level0_magnification": _MAGNIFICATION_TIMES_MPP / slide.mpp[0],
            "target_magnification": _MAGNIFICATION_TIMES_MPP / tile.mpp,
            "overlap": tile.overlap_px,
            "name": job.output.stem,
            "savetodir": str(job.output.parent.absolute()),
            "level0_width": slide.dimensions[0],
            "level0_height": slide.dimensions[1],
        },
        thumbnail=thumbnail.pixels,
        thumbnail_downsample=thumbnail.downsample,
        tissue_mask=plan.mask.mask.astype(np.uint8),
        tissue_mask_downsample=plan.mask.downsample,
    )


@cache
def _library_versions() -> dict[str, str]:
    names = ("torch", "openslide-python", "openslide-bin", "tifffile", "imagecodecs", "numpy")
    found = {"bioptimus-wsi": __version__, "python": platform.python_version()}
    for name in (*names, "opencv-python-headless", "h5py"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed as a package"
    return found


def library_versions() -> dict[str, str]:
    """Versions of what shapes a result, for the file and the report."""
    # Looked up once: every look parses the packages' metadata files.
    return dict(_library_versions())
