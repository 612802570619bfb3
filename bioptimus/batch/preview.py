"""What a run would do, without a model in memory and without writing anything."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bioptimus.batch.run import RunConfig, list_work
from bioptimus.errors import BioptimusError, SlideOpenError
from bioptimus.io.wsi import Slide
from bioptimus.models.types import ModelSpec
from bioptimus.pipeline import SlideJob, SlideOptions, error_text, job_options
from bioptimus.planning import Segmenter, is_tissue_model, plan_slide
from bioptimus.runtime.segmenter import open_segmenter

_BYTES_PER_VALUE = {"float32": 4, "float16": 2}
# Coordinates, tissue ratio; thumbnail and mask are the same for any number of tiles.
_BYTES_PER_ROW = 20


@dataclass(frozen=True, kw_only=True)
class SlidePreview:
    """What a run would make of one slide.

    Attributes:
        name: What messages call the slide.
        output: Where its result would go.
        mpp: (x, y) µm per level-0 pixel.
        mpp_source: Where that came from.
        level: Pyramid level that tiles would be read from.
        level_downsample: Level-0 pixels per pixel of that level, along x.
        tiles: How many tiles would be read.
        output_bytes: About how large the result would be.
        error: Why the slide would fail; empty if it would not.
    """

    name: str
    output: Path
    mpp: tuple[float, float] = (0.0, 0.0)
    mpp_source: str = ""
    level: int = 0
    level_downsample: float = 1.0
    tiles: int = 0
    output_bytes: int = 0
    error: str = ""


def preview(config: RunConfig) -> Iterator[SlidePreview]:
    """Open every slide of a run and plan it.

    Raises:
        UsageError: The inputs or options make no sense, or two results would share a name.
    """
    work = list_work(config)
    tissue = config.slide.plan.tissue
    segmenter = open_segmenter(tissue, device=config.device) if is_tissue_model(tissue) else None
    for job in work.jobs:
        try:
            yield _preview(job, config.slide, work.model.spec, segmenter)
        except BioptimusError as exc:
            yield SlidePreview(name=job.name, output=job.output, error=error_text(exc))


def _preview(
    job: SlideJob, options: SlideOptions, spec: ModelSpec, segmenter: Segmenter | None
) -> SlidePreview:
    if job.problem is not None:
        raise SlideOpenError(f"{job.path.name}: {job.problem}")
    opening, planning = job_options(job, options)
    with Slide.open(job.path, opening) as slide:
        plan = plan_slide(slide, spec.tile, planning, segmenter=segmenter)
        reader = slide.tile_reader(plan.spec)
        values = spec.embedding_dim * options.mode.wants_embedding
        values += spec.prediction_dim * options.mode.wants_prediction
        row = values * _BYTES_PER_VALUE[options.dtype] + _BYTES_PER_ROW
        return SlidePreview(
            name=job.name,
            output=job.output,
            mpp=slide.mpp,
            mpp_source=slide.resolution.source,
            level=reader.level,
            level_downsample=reader.level_downsample[0],
            tiles=len(plan),
            output_bytes=len(plan) * row,
        )
