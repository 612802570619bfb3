"""What a run has to do: its model, and the slides of its share with where their results go."""

import logging
import multiprocessing
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bioptimus.batch.config import RunConfig
from bioptimus.batch.inputs import SlideInput, find_inputs, model_folder, output_path
from bioptimus.batch.neighbours import first_result, made_otherwise
from bioptimus.batch.places import refuse_unwritable
from bioptimus.batch.report import RUNS_FOLDER
from bioptimus.batch.shards import parse_shard, share
from bioptimus.batch.stage import staging_folder
from bioptimus.errors import UsageError
from bioptimus.jobs import SlideJob
from bioptimus.models.types import InferenceMode, ModelSpec
from bioptimus.omics import read_bulk_rna
from bioptimus.planning import lacks_mask, require_tissue_file
from bioptimus.recipe import run_parameters, scale_warning
from bioptimus.runtime.archive import file_sha256
from bioptimus.runtime.loader import ModelChoice, require_loaded, resolve_model

if TYPE_CHECKING:
    from bioptimus.runtime.server_model import BaseServerModel

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a run has to do.

    Attributes:
        model: The model, described but not loaded.
        slides: The slides of this run's share, as the inputs name them.
        jobs: The same slides, with where their results go.
        skipped: (path, reason) of files below the inputs that are not slides.
        notes: What the user should know before the run, one sentence each.
    """

    model: ModelChoice
    slides: tuple[SlideInput, ...]
    jobs: tuple[SlideJob, ...]
    skipped: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()

    def tell_notes(self) -> None:
        """Log the notes; in a process of several devices, the parent has done so."""
        if multiprocessing.parent_process() is None:
            for note in self.notes:
                log.warning("%s", note)


def list_work(config: RunConfig, model: "BaseServerModel | None" = None) -> Work:
    """Find the model's description and the slides of this run's share.

    Args:
        config: What to do.
        model: Loaded already, in place of the configuration's.

    Raises:
        UsageError: The inputs or options make no sense, or two results would share a name.
        CheckpointError: The model's file is missing, damaged or foreign.
    """
    refuse_unwritable(config.out, option="--out")
    if config.stage is not None:
        refuse_unwritable(staging_folder(config.stage), option="--stage")
    require_tissue_file(config.slide.plan.tissue)
    choice = _choice(config, model)
    _check_mode(choice.spec, config.slide.mode)
    for folder in (model_folder(config.out, choice.spec.name), config.out / RUNS_FOLDER):
        refuse_unwritable(folder, option="--out")
    tile = config.slide.plan.applied_to(choice.spec.tile)
    if tile.size_px != choice.spec.tile.size_px:
        raise UsageError(
            f"--tile-size-px {tile.size_px}: {choice.spec.name} reads tiles of "
            f"{choice.spec.tile.size_px} px and no others; leave it out"
        )
    inputs = find_inputs(config.inputs, exclude=(config.out,))
    _check_rna(config, choice.spec, inputs.slides)
    slides = inputs.slides
    if config.shard is not None:
        slides = share(slides, parse_shard(config.shard))
    slides = tuple(_with_problem(each, config, choice.spec) for each in slides)
    jobs = tuple(_job(each, config, choice.spec) for each in slides)
    return Work(
        model=choice,
        slides=slides,
        jobs=jobs,
        skipped=tuple((str(path), reason) for path, reason in inputs.skipped),
        notes=(*inputs.notes, *_notes(config, choice, inputs.slides, jobs)),
    )


def _notes(
    config: RunConfig, choice: ModelChoice, slides: Iterable[SlideInput], jobs: Iterable[SlideJob]
) -> Iterator[str]:
    spec, folder = choice.spec, model_folder(config.out, choice.spec.name)
    there = first_result(folder)
    # What is there of a slide of this run, the run itself refuses or replaces.
    if there is not None and there not in {job.output for job in jobs}:
        now = run_parameters(spec, file_sha256(choice.checkpoint), config.slide)
        if words := made_otherwise(there, now):
            yield (
                f"{folder}: holds results that were made otherwise, as "
                f"{there.relative_to(folder)} ({words}); pass another --out to keep them apart"
            )
    if scale := scale_warning(config.slide.plan, spec):
        yield scale
    if not spec.rna_dim and any(slide.bulk_rna is not None for slide in slides):
        # No error: one list may serve several models.
        yield f"{spec.name} reads no bulk RNA: the list's column bulk_rna is not used"


def _check_rna(config: RunConfig, spec: ModelSpec, slides: Iterable[SlideInput]) -> None:
    """Refuse RNA that the model does not read, RNA that is missing, and a table that is none.

    Raises:
        UsageError: One of these.
    """
    columns = (config.slide.gene_column, config.slide.value_column)
    options = ("--bulk-rna", "--gene-column", "--value-column")
    given = [
        option
        for option, value in zip(options, (config.bulk_rna, *columns), strict=True)
        if value is not None
    ]
    if not spec.rna_dim:
        if given:
            raise UsageError(f"{spec.name}: reads no bulk RNA; leave out {' and '.join(given)}")
    elif config.bulk_rna is not None:
        read_bulk_rna(config.bulk_rna, spec, gene_column=columns[0], value_column=columns[1])
    elif all(slide.bulk_rna is None for slide in slides):
        raise UsageError(
            f"{spec.name} reads bulk RNA; pass --bulk-rna, or a list with a bulk_rna column"
        )


def _with_problem(each: SlideInput, config: RunConfig, spec: ModelSpec) -> SlideInput:
    """The slide, with what its list lacks for it as a problem."""
    problem = each.problem
    if problem is None and each.mask is None:
        problem = lacks_mask(config.slide.plan)
    if problem is None and each.mask is not None and not os.path.isfile(each.mask):
        problem = f"mask {each.mask}: no such file; correct the list"
    if problem is None and spec.rna_dim:
        rna = each.bulk_rna or config.bulk_rna
        if rna is None:
            problem = f"{spec.name} reads bulk RNA; pass --bulk-rna, or fill the bulk_rna column"
        elif not os.path.isfile(rna):
            problem = f"bulk RNA {rna}: no such file; correct the list"
    return each if problem is each.problem else replace(each, problem=problem)


def _choice(config: RunConfig, model: "BaseServerModel | None") -> ModelChoice:
    if model is None:
        return resolve_model(config.model, config.checkpoint, sha256=config.sha256)
    require_loaded(model)
    # A model without a file has no digest, by which results of one model are told from another's.
    return ModelChoice(
        name=model.model_name, spec=model.model_spec, checkpoint=model.checkpoint_path
    )


def _check_mode(spec: ModelSpec, mode: InferenceMode) -> None:
    if spec.output_kind == "mask":
        raise UsageError(f"{spec.name}: makes tissue masks; pass it as --tissue instead")
    if not spec.supports(mode):
        made = "embeddings" if spec.makes_embedding else "predictions"
        raise UsageError(f"{spec.name}: makes {made} only; choose another --model or command")


def _job(each: SlideInput, config: RunConfig, spec: ModelSpec) -> SlideJob:
    return SlideJob(
        path=each.path,
        output=output_path(config.out, spec.name, each),
        name=str(each.relative),
        mpp=each.mpp,
        mask=each.mask,
        bulk_rna=each.bulk_rna or config.bulk_rna,
        extra=each.extra,
        problem=each.problem,
    )
