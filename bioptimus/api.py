"""The main job as one call, for scripts and notebooks."""

import inspect
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from bioptimus.batch.quiet import Stop
from bioptimus.batch.run import RunConfig, run
from bioptimus.batch.work import list_work
from bioptimus.errors import BioptimusError, SlideError, UsageError
from bioptimus.io.wsi import OpenOptions
from bioptimus.jobs import SlideOptions, SlideReport
from bioptimus.kinds import checks_kinds
from bioptimus.models.types import InferenceMode
from bioptimus.planning import PlanOptions
from bioptimus.runtime.loader import require_loaded

if TYPE_CHECKING:
    from bioptimus.inference.results import Result
    from bioptimus.runtime.server_model import BaseServerModel


@contextmanager
def _python_names_noted() -> Iterator[None]:
    """Add to an error's notes what the options that it names are called in Python."""
    try:
        yield
    except BioptimusError as exc:
        known = {
            name: f"the argument {name}" for name in inspect.signature(embed_slide).parameters
        } | {
            field.name: f"{options.__name__}.{field.name}"
            for options in (SlideOptions, PlanOptions, OpenOptions)
            for field in fields(options)
        }
        named = dict.fromkeys(re.findall(r"(?<![\w-])--[a-z][a-z-]*", str(exc)))
        told = [
            f"{option} is {known[name]}"
            for option in named
            if (name := option[2:].replace("-", "_")) in known
        ]
        if told:
            exc.add_note(f"in Python {', '.join(told)}")
        raise


@_python_names_noted()
@checks_kinds
def embed_slide(
    slide: Path | str,
    *,
    out: Path | str = "embeddings",
    model: "str | Path | BaseServerModel" = "lite0",
    checkpoint: Path | str | None = None,
    device: str = "auto",
    batch_size: int | Literal["auto"] | None = None,
    bulk_rna: Path | str | None = None,
    predictions: bool = False,
    options: SlideOptions | None = None,
) -> "Result":
    """Embed one slide and open the result; what is done already is only opened.

    A model that is named is loaded by each call; load it once with
    :func:`bioptimus.runtime.build_server_model` and pass that instead for several slides. For
    many, one :func:`bioptimus.batch.run.run` over a folder is faster still, since it reads the next
    slide while this one ends. Works inside a running event loop, such as a notebook's.

    Args:
        slide: The slide file.
        out: Folder for results, as ``--out`` of the command.
        model: Registry key, path of a self-describing ``.pt2``, or a model loaded from a file.
        checkpoint: ``.pt2`` for a registry key whose weights are the user's.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``; a loaded model stays where it is.
        batch_size: Most tiles in one forward pass; None: 48, but on a CPU 4 for
            each thread of a pass, unless the model has less than a megabyte;
            ``auto`` tries which is the fastest that fits.
        bulk_rna: Table of TPM values, for a model that reads them.
        predictions: Whether to write the predictions of the same forward pass too.
        options: Scale, tiles, tissue and more; their mode is set by ``predictions``.

    Returns:
        The opened result, its rows in plan order, row by row over the slide. A slide without tissue
        has one of no rows, whose ``state`` is ``empty``.

    Raises:
        UsageError: The path holds several slides, a path is empty, a value is of another kind, or
            options contradict each other.
        SlideError: The slide cannot be read; the message says why and what to do.
        ModelError: The model cannot be loaded or run.
        OutputError: The result cannot be written, or a file from other parameters is there.

    An error that names options of the command has a note with their names in Python.
    """
    mode = InferenceMode.PREDICTION_WITH_EMBEDDING if predictions else InferenceMode.EMBEDDING
    loaded = None
    if not isinstance(model, str | Path):
        require_loaded(model)
        loaded = model
        _check_loaded(loaded, checkpoint, device)
        model, checkpoint, device = loaded.model_name, loaded.checkpoint_path, loaded.device
    config = RunConfig(
        inputs=(str(slide),),
        out=Path(out),
        model=str(model),
        checkpoint=None if checkpoint is None else Path(checkpoint),
        device=device,
        batch_size=batch_size,
        bulk_rna=None if bulk_rna is None else Path(bulk_rna),
        slide=replace(options or SlideOptions(), mode=mode),
        command=("embed_slide", str(slide)),
    )
    count = len(list_work(config, loaded).jobs)
    if count != 1:
        raise UsageError(f"{slide}: holds {count} slides; give one, or use bioptimus.batch.run")
    stop = Stop()
    # The caller's thread only waits, so that a stop button reaches it while the run goes on.
    with ThreadPoolExecutor(1, thread_name_prefix="embed-slide") as one:
        running = one.submit(run, config, stop=stop, model=loaded)
        try:
            reports = running.result().reports
        except KeyboardInterrupt:
            # Rows under way land before this leaves the block; the part file resumes.
            stop.stopped = True
            raise
    return _opened(reports[0])


def _check_loaded(model: "BaseServerModel", checkpoint: Path | str | None, device: str) -> None:
    if checkpoint is not None:
        raise UsageError(
            f"checkpoint {checkpoint}: {model.model_name} is loaded already; leave out one of them"
        )
    if device not in ("auto", model.device, model.device.partition(":")[0]):
        raise UsageError(
            f"device {device}: {model.model_name} is on {model.device}; load it on {device}, or "
            "leave out the device"
        )


def _opened(report: SlideReport) -> "Result":
    from bioptimus.inference.results import open_result

    if report.output:
        return open_result(report.output)
    if isinstance(report.error, BioptimusError):
        raise report.error
    raise SlideError(f"{report.slide}: {report.reason or report.state}") from report.error
