"""``bioptimus submit``: the same command, dealt out over a SLURM cluster as an array job."""

import os
import shlex
import sys
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bioptimus.counting import counted
from bioptimus.errors import UsageError
from cli.progress import left_out, say

if TYPE_CHECKING:
    from bioptimus.batch.work import Work

# What follows the action belongs to it, options and all.
CONTEXT_SETTINGS: dict[str, object] = {"allow_interspersed_args": False}


class Action(StrEnum):
    """The commands that can run as an array."""

    EMBED = "embed"
    PREDICT = "predict"


def submit(
    context: typer.Context,
    action: Annotated[Action, typer.Argument(help="The command to run in every task.")],
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="SLIDES... [OPTIONS]",
            help="Slides, folders, globs, CSV lists or -, then options, as that command takes "
            "them. --shard is added.",
        ),
    ],
    tasks: Annotated[
        int, typer.Option(help="Tasks of the array: the slides are dealt out in as many shares.")
    ] = 8,
    max_running: Annotated[
        int | None,
        typer.Option(
            help="Tasks that may run at once, the %N of sbatch's --array.", show_default="all"
        ),
    ] = None,
    partition: Annotated[
        str | None, typer.Option("--partition", "-p", help="Partition (queue) to run in.")
    ] = None,
    time: Annotated[
        str | None,
        typer.Option("--time", "-t", help="Limit of each task: 12:00:00, or 2-00 for two days."),
    ] = None,
    gpus: Annotated[
        str | None, typer.Option(help="GPUs of each task: 1, or with their type a100:1.")
    ] = None,
    cpus: Annotated[int | None, typer.Option(help="CPU cores of each task.")] = None,
    memory_gb: Annotated[int | None, typer.Option(help="Memory of each task.")] = None,
    stop_early_s: Annotated[
        int,
        typer.Option(
            help="Seconds before the time limit at which a task stops, having written what it has."
        ),
    ] = 120,
    requeue: Annotated[
        bool, typer.Option(help="Queue a task again that is preempted or loses its node.")
    ] = True,
    name: Annotated[str | None, typer.Option(help="Name of the job.", show_default=False)] = None,
    sbatch_option: Annotated[
        list[str] | None,
        typer.Option(help="Any further option of sbatch, such as --account=lab. May be repeated."),
    ] = None,
    setup: Annotated[
        list[str] | None,
        typer.Option(help="Shell line to run first: 'module load cuda'. May be repeated."),
    ] = None,
    job_folder: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the script, the frozen list of slides and the logs.",
            show_default="bioptimus-jobs/<name>-<time>",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the script; write and submit nothing.")
    ] = False,
) -> None:
    """Run embed or predict as a SLURM array: write the script, show it or submit it.

    For example: bioptimus submit --partition gpu --gpus 1 --tasks 16 embed slides/ --out results

    The slides are found now and frozen in a list beside the script, so slides that arrive later
    are not part of the job. Prints the job's id.
    """
    from bioptimus.batch.places import refuse_unwritable
    from bioptimus.batch.submit import ArrayJob, ArrayOptions

    slides, arguments = _split(words)
    parsed = _parse_action(context, action, slides, arguments)
    if "--dry-run" in arguments:
        # Meant for this command: an array of dry runs is of no use to anybody.
        dry_run, arguments = True, [word for word in arguments if word != "--dry-run"]
    job_name = name or f"bioptimus-{action}"
    started = f"{datetime.now():%Y%m%d-%H%M%S}"
    folder = job_folder or Path("bioptimus-jobs") / f"{job_name}-{started}"
    refuse_unwritable(folder, option="--job-folder")
    work = _check(action, parsed)
    job = ArrayJob(
        folder=folder,
        working_folder=Path.cwd(),
        command=_own_command(),
        action=action.value,
        arguments=tuple(arguments),
        slides=work.slides,
        environment=_environment(action),
        options=ArrayOptions(
            tasks=tasks,
            max_running=max_running,
            name=job_name,
            partition=partition,
            time_limit=time,
            gpus=gpus,
            cpus=cpus,
            memory_gb=memory_gb,
            stop_early_s=stop_early_s,
            requeue=requeue,
            further=tuple(sbatch_option or ()),
            setup=tuple(setup or ()),
        ),
    )
    for line in left_out(work.skipped):
        say(line, err=True)
    if dry_run:
        typer.echo(job.text(), nl=False)
        typer.echo(f"{job.size}; nothing submitted", err=True)
        return
    job.write()
    say(f"wrote {job.script} and {job.slide_list.name} beside it", err=True)
    number = job.submit()
    typer.echo(number)
    for line in (
        f"{job.size}, job {number}",
        f"  watch    squeue --job {number}",
        f"  logs     tail -n +1 {shlex.quote(str(job.script.parent / 'logs'))}/{number}_*.log",
        f"  stop     scancel {number}",
        f"  go on    sbatch {shlex.quote(str(job.script))}",
        f"  result   bioptimus report {shlex.quote(str(parsed['out']))}",
    ):
        say(line, err=True)


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Part the slides from the options behind them."""
    options_at = (n for n, word in enumerate(words) if word.startswith("-") and word != "-")
    first = next(options_at, len(words))
    if words[first : first + 1] == ["--"]:
        return words[first + 1 :], []
    return words[:first], words[first:]


def _parse_action(
    context: typer.Context, action: Action, slides: list[str], arguments: list[str]
) -> dict[str, Any]:
    """Parse the action's own words, so that a mistake shows now and not in every task.

    Returns:
        The action's parameters by name.
    """
    group: Any = context.find_root().command
    command = group.get_command(context, action.value)
    # Its parent is the program, as in a task: variables such as BIOPTIMUS_EMBED_OUT count here too.
    root = context.find_root()
    parsed = command.make_context(action.value, [*slides, *arguments], parent=root)
    positional = next(p.name for p in command.params if p.param_type_name == "argument")
    given = [str(word) for word in parsed.params[positional] or ()]
    if given != slides:
        raise UsageError(
            f"{', '.join(word for word in given if word not in slides)}: give the slides right "
            f"after {action.value}, and the options behind them"
        )
    if parsed.params.get("shard") is not None:
        raise UsageError("--shard: every task gets its own; use --tasks to say how many")
    params: dict[str, Any] = parsed.params
    return params


def _check(action: Action, parsed: dict[str, Any]) -> "Work":
    """Find the slides, and refuse now what every task would refuse.

    What may be another machine's is left to it: whether a device is there, and the folder that
    slides are staged in.

    Raises:
        UsageError: An option makes no sense, the model or mask is not there, or a slide is not.
    """
    from dataclasses import replace

    from bioptimus.batch.places import refuse_dash
    from bioptimus.batch.work import list_work
    from bioptimus.models.types import InferenceMode
    from cli.run_slides import run_config

    mode = InferenceMode.EMBEDDING if action is Action.EMBED else InferenceMode.PREDICTION
    if parsed.get("with_embeddings"):
        mode = InferenceMode.PREDICTION_WITH_EMBEDDING
    config = run_config(parsed, mode)
    if config.stage is not None:
        refuse_dash(config.stage, option="--stage")
    work = list_work(replace(config, stage=None))
    bad = [slide for slide in work.slides if slide.problem is not None]
    for slide in bad:
        say(f"{slide.path}: {slide.problem}", err=True)
    if bad:
        slides = counted(len(work.slides), "slide")
        raise UsageError(f"{len(bad)} of {slides} cannot be used; mend these, or leave them out")
    for note in work.notes:
        typer.echo(f"WARNING: {note}", err=True)
    return work


def _environment(action: Action) -> dict[str, str]:
    """The variables that the action takes options from."""
    start = f"BIOPTIMUS_{action.upper()}_"
    return {name: value for name, value in os.environ.items() if name.startswith(start)}


def _own_command() -> tuple[str, ...]:
    """Return how to start this program on another machine: by full path, whatever PATH is there."""
    installed = Path(sys.executable).with_name("bioptimus")
    if installed.exists():
        return (str(installed),)
    return (sys.executable, "-m", "bioptimus")
