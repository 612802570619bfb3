"""What `embed` and `predict` share: run, report, exit code."""

import errno
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from bioptimus.errors import OutputError
from cli.progress import (
    HELD,
    drop_unsaid,
    event_line,
    left_out,
    left_out_events,
    rate_text,
    say,
    say_table,
    without_name,
)

if TYPE_CHECKING:
    from bioptimus.batch.run import RunConfig, RunResult
    from bioptimus.batch.signals import StopFlag
    from bioptimus.models.types import InferenceMode
    from cli.progress import LineProgress

# How often to look whether a signal has come.
_LOOK_SECONDS = 0.1
# How long a signal may be behind what it is the reason of.
_SIGNAL_SECONDS = 1.0

# Options that mean the same under the same name in RunConfig.
_RUN_NAMES = (
    *("out", "model", "checkpoint", "sha256", "device", "batch_size", "max_wait_ms"),
    *("workers", "readers", "threads", "shard", "stage", "stage_gb", "fail_fast"),
    "bulk_rna",
)


def run_slides(options: Mapping[str, Any], *, mode: "InferenceMode") -> int:
    """Run what the command line asks for and show how it ended.

    Args:
        options: The command's parameters by name.
        mode: What the model is asked for.

    Returns:
        The exit code: 0, 1 if a slide failed, 130 / 143 / 129 after SIGINT / SIGTERM / SIGHUP.

    Raises:
        OutputError: Paths of finished files could not be told; the run went on to its end.
    """
    if options["dry_run"]:
        from cli.dry_run import show_plan

        return show_plan(run_config(options, mode))
    from bioptimus.batch.signals import StopFlag
    from cli.progress import choose_progress

    progress = choose_progress(log_json=options["log_json"])
    with StopFlag(at_once=progress.abandon) as stop:
        try:
            return _run(options, mode, progress, stop)
        except OSError as exc:
            # Raised by what cannot be said any more. A closed terminal, and a reader of ours that
            # the same Ctrl-C ended, may be noticed before the signal.
            if exc.errno not in (errno.EIO, errno.EPIPE) or not stop.wait(_SIGNAL_SECONDS):
                raise
            drop_unsaid()
            assert stop.exit_code is not None
            return stop.exit_code


def _run(
    options: Mapping[str, Any], mode: "InferenceMode", progress: "LineProgress", stop: "StopFlag"
) -> int:
    """Run until the end or a signal; the exit code."""
    with progress, _announced(stop, progress):
        # Loaded here: it takes a second, and a Ctrl-C within it ends the run as later ones do.
        from bioptimus.batch.devices import run_on_devices
        from bioptimus.batch.run import run

        config = run_config(options, mode)
        if stop.exit_code is not None:
            return stop.exit_code
        start = run_on_devices if "," in config.device else run
        result = start(config, listener=progress, stop=stop)
    with suppress(OSError):  # as for the lines of the run
        if options["log_json"]:
            for line in left_out_events(result.skipped):
                say(line, err=True)
            line = event_line("run_ended", counts=_counts(result), report=str(result.run_file))
            say(line, err=True)
        else:
            _show_table(result)
    if stop.exit_code is not None:
        return stop.exit_code
    if progress.unwritten is not None:
        raise OutputError(
            f"standard output: {progress.unwritten.strerror}; paths are missing there, and are all "
            f"in {result.run_file}"
        )
    return 1 if result.failed else 0


@contextmanager
def _announced(stop: "StopFlag", progress: "LineProgress") -> Iterator[None]:
    """Tell the user when the first signal is heard, while the block goes on.

    By a thread that looks and ends with the block: the signal's handler may not print, since it
    may have interrupted a print.
    """
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(_LOOK_SECONDS):
            if stop.stopped:
                progress.stopping()
                return

    thread = threading.Thread(target=watch, name="announce-stop")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def run_config(options: Mapping[str, Any], mode: "InferenceMode") -> "RunConfig":
    """What the command's parameters, by name, ask the library for.

    Raises:
        UsageError: A value makes no sense on any machine.
    """
    from bioptimus.batch.run import RunConfig
    from bioptimus.io.wsi import OpenOptions
    from bioptimus.jobs import SlideOptions
    from bioptimus.planning import PlanOptions

    return RunConfig(
        inputs=tuple(options["inputs"]),
        command=tuple(sys.argv),
        slide=SlideOptions(
            mode=mode,
            opening=OpenOptions(
                mpp_override=options["mpp_override"],
                mpp_fallback=options["mpp_fallback"],
                reader=options["reader"].value,
                icc=options["icc"].value,
                allow_upsample=options["allow_upsample"],
            ),
            plan=PlanOptions(
                tile_size_px=options["tile_size_px"],
                tile_mpp=options["tile_mpp"],
                overlap_px=options["overlap_px"],
                min_tissue=options["min_tissue"],
                tissue=options["tissue"],
                tissue_class=tuple(options["tissue_class"] or ()),
                search_in_mask=options["search_in_mask"],
                keep_pen=options["keep_pen"],
            ),
            dtype=options["dtype"].value,
            max_failed_tiles=options["max_failed_tiles"],
            overwrite=options["overwrite"],
            gene_column=options.get("gene_column"),
            value_column=options.get("value_column"),
        ),
        **{name: options[name] for name in _RUN_NAMES if name in options},
    )


def _show_table(result: "RunResult") -> None:
    """The run's table on stderr: every input and its state."""
    if not result.reports:
        say("nothing to do: this share of the inputs is empty", err=True)
        return
    for line in left_out(result.skipped):
        say(line, err=True)
    if sys.stderr.isatty():
        heads = ("state", "tiles", "failed", "tiles/s", "seconds", "slide")
        rows = [
            (
                report.state,
                str(report.tiles_done),
                str(report.tiles_failed),
                rate_text(report),
                f"{report.seconds.total:.1f}",
                ": ".join(filter(None, (report.slide, without_name(report.reason, report.slide)))),
            )
            for report in result.reports
        ]
        say_table(heads, rows, err=True)
    summary = ", ".join(f"{count} {state}" for state, count in _counts(result).items())
    say(f"{summary}; report: {result.run_file}", err=True)


def _counts(result: "RunResult") -> dict[str, int]:
    """How many slides ended how."""
    from bioptimus.batch.report import is_left_to_another_job

    counts: dict[str, int] = {}
    for report in result.reports:
        state = HELD if is_left_to_another_job(report.state, report.output) else report.state
        counts[state] = counts.get(state, 0) + 1
    return counts
