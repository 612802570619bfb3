"""What a run would do, without a model in memory and without writing anything."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from bioptimus.batch.config import RunConfig
from bioptimus.batch.work import Work, list_work
from bioptimus.errors import BioptimusError, OutputError, OutputMismatchError, SlideOpenError
from bioptimus.inference.layout import digest_of
from bioptimus.inference.writers import look_at_existing, look_at_part
from bioptimus.io.wsi import Slide
from bioptimus.jobs import SlideJob, SlideOptions
from bioptimus.models.types import ModelSpec
from bioptimus.pipeline import THUMBNAIL_PX, error_text, unexpected
from bioptimus.planning import Segmenter, SlidePlan, is_tissue_model, plan_slide
from bioptimus.recipe import digest_parameters, job_options, rows_plan, slide_rna
from bioptimus.runtime.archive import file_sha256
from bioptimus.runtime.segmenter import open_segmenter

_BYTES_PER_VALUE = {"float32": 4, "float16": 2}
# Coordinates, tissue ratio, checksum.
_BYTES_PER_ROW = 24
# Of the thumbnail, compressed: glass is not free of noise, tissue takes about this much more.
_BYTES_PER_GLASS_PX, _MORE_PER_TISSUE_PX = 0.6, 0.8

PreviewState = Literal["new", "resume", "done", "other parameters", "would fail"]


@dataclass(frozen=True, kw_only=True)
class SlidePreview:
    """What a run would make of one slide.

    Attributes:
        name: What messages call the slide.
        output: Where its result would go.
        state: ``new``; ``resume`` of what a stopped run left; ``done`` already; ``other
            parameters`` for a finished file, or rows of a stopped run, made otherwise, at which
            the slide would fail; or ``would fail`` for another reason.
        mpp: (x, y) µm per level-0 pixel.
        mpp_source: Where that came from.
        level: Pyramid level that tiles would be read from.
        level_downsample: Level-0 pixels per pixel of that level, along x.
        tiles: How many tiles the result has.
        tiles_done: How many of them are there already.
        output_bytes: About how large the result would be.
        warnings: What a run would say of the slide.
        error: Why the slide would fail; empty if it would not.
    """

    name: str
    output: Path
    state: PreviewState = "new"
    mpp: tuple[float, float] = (0.0, 0.0)
    mpp_source: str = ""
    level: int = 0
    level_downsample: float = 1.0
    tiles: int = 0
    tiles_done: int = 0
    output_bytes: int = 0
    warnings: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class RunPreview:
    """What a run would do.

    Attributes:
        slides: One for each slide of the run's share, each opened when it is asked for.
        skipped: (path, reason) of files below the inputs that are not part of the run.
        notes: What the user should know before the run, one sentence each.
    """

    slides: Iterator[SlidePreview]
    skipped: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()


def preview(config: RunConfig) -> RunPreview:
    """Say what a run would do.

    Raises:
        UsageError: The inputs or options make no sense, or two results would share a name.
    """
    work = list_work(config)
    return RunPreview(slides=_slides(config, work), skipped=work.skipped, notes=work.notes)


def _slides(config: RunConfig, work: Work) -> Iterator[SlidePreview]:
    tissue = config.slide.plan.tissue
    segmenter = None
    if is_tissue_model(tissue):
        segmenter = open_segmenter(tissue, device=config.devices[0])
    model_sha256 = file_sha256(work.model.checkpoint)
    for job in work.jobs:
        try:
            yield _preview(job, config.slide, work.model.spec, model_sha256, segmenter)
        except OutputMismatchError as exc:
            yield _failing(job, error_text(exc), state="other parameters")
        except BioptimusError as exc:
            yield _failing(job, error_text(exc), state="would fail")
        except Exception as exc:  # noqa: BLE001
            # The slide's edge, as in the run itself.
            yield _failing(job, unexpected(job.name, exc), state="would fail")


def _failing(job: SlideJob, error: str, *, state: PreviewState) -> SlidePreview:
    return SlidePreview(name=job.name, output=job.output, state=state, error=error)


def _preview(
    job: SlideJob,
    options: SlideOptions,
    spec: ModelSpec,
    model_sha256: str,
    segmenter: Segmenter | None,
) -> SlidePreview:
    if job.problem is not None:
        raise SlideOpenError(f"{job.path.name}: {job.problem}")
    opening, planning = job_options(job, options)
    rna = slide_rna(job, spec, options)
    with Slide.open(job.path, opening) as slide:
        parameters = digest_parameters(
            slide, spec, model_sha256, options, planning, None if rna is None else rna.values
        )
        digest = digest_of(parameters)
        try:
            done = look_at_existing(
                job.output,
                digest=digest,
                digest_parameters=parameters,
                whole=options.overwrite,
            )
        except OutputError:
            if not options.overwrite:
                raise
            done = None
        plan = plan_slide(slide, spec.tile, planning, segmenter=segmenter)
        reader = slide.tile_reader(plan.spec)
        rows = rows_plan(plan, spec, options, digest=digest, parameters=parameters)
        values = sum(rows.columns.values())
        row_bytes = values * _BYTES_PER_VALUE[options.dtype] + _BYTES_PER_ROW
        found = SlidePreview(
            name=job.name,
            output=job.output,
            mpp=slide.mpp,
            mpp_source=slide.resolution.source,
            level=reader.level,
            level_downsample=reader.level_downsample[0],
            tiles=len(plan),
            output_bytes=len(plan) * row_bytes + _picture_bytes(slide, plan),
            warnings=(*(() if rna is None else rna.warnings), *slide.warnings, *plan.warnings),
        )
    if done is not None:
        return replace(found, state="done", tiles_done=found.tiles)
    part = look_at_part(job.output, rows, overwrite=options.overwrite)
    if isinstance(part, str):
        return replace(found, warnings=(*found.warnings, f"starting anew: {part}"))
    return replace(found, state="resume", tiles_done=part) if part else found


def _picture_bytes(slide: Slide, plan: SlidePlan) -> int:
    """About what the thumbnail takes; the tissue mask is a fiftieth of it."""
    width, height = slide.dimensions
    pixels = width * height * min(1, THUMBNAIL_PX / max(width, height)) ** 2
    return round(pixels * (_BYTES_PER_GLASS_PX + _MORE_PER_TISSUE_PX * plan.mask.share))
