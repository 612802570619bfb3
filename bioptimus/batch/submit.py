"""Write and submit the array job that deals a list of slides out over a SLURM cluster."""

import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bioptimus.batch.inputs import SlideInput
from bioptimus.batch.lists import write_list
from bioptimus.counting import counted
from bioptimus.errors import OutputError, SubmitError, UsageError
from bioptimus.inference.disk import refuse_file
from bioptimus.kinds import check_kinds

SCRIPT_NAME = "job.sh"
LIST_NAME = "slides.csv"
LOGS_NAME = "logs"

# Minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S, as sbatch takes them.
_TIME_LIMIT = re.compile(r"\d+|\d+:\d+(:\d+)?|\d+-\d+(:\d+){0,2}|UNLIMITED|INFINITE", re.ASCII)
_GPUS = re.compile(r"([\w.-]+:)?\d+", re.ASCII)
_PLAIN = re.compile(r"[\w@%+=:,./-]+", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class ArrayOptions:
    """What the job asks of SLURM; None leaves it to the cluster's default.

    Attributes:
        tasks: Width of the array: how many shares the slides are dealt out in.
        max_running: How many tasks may run at once.
        name: Name of the job.
        partition: Partition to run in.
        time_limit: Limit of each task, such as ``12:00:00`` or ``2-00`` (days-hours).
        gpus: GPUs of each task, ``1`` or with their type ``a100:1``.
        cpus: CPU cores of each task.
        memory_gb: Memory of each task.
        stop_early_s: Seconds before the time limit at which a task is told to stop.
        requeue: Whether a task that is preempted, or loses its node, is queued again.
        further: Further sbatch options, each as one word: ``--account=lab``.
        setup: Shell lines to run first, such as ``module load cuda``.
    """

    tasks: int
    max_running: int | None = None
    name: str = "bioptimus"
    partition: str | None = None
    time_limit: str | None = None
    gpus: str | None = None
    cpus: int | None = None
    memory_gb: int | None = None
    stop_early_s: int = 120
    requeue: bool = True
    further: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what sbatch would refuse, or misread, later.

        Raises:
            UsageError: A value is of another kind, a number is below its least, a time or GPU count
                is malformed, or a value holds a line break, which would end its line of the script.
        """
        check_kinds(self)
        for option, value, least in (
            ("--tasks", self.tasks, 1),
            ("--max-running", self.max_running, 1),
            ("--cpus", self.cpus, 1),
            ("--memory-gb", self.memory_gb, 1),
            ("--stop-early-s", self.stop_early_s, 0),
        ):
            if value is not None and value < least:
                raise UsageError(f"{option} {value}: must be at least {least}")
        if self.time_limit is not None and not _TIME_LIMIT.fullmatch(self.time_limit):
            raise UsageError(
                f"--time {self.time_limit}: give minutes, hours:minutes:seconds or days-hours"
            )
        limit_s = _seconds(self.time_limit)
        if limit_s is not None and limit_s <= self.stop_early_s:
            raise UsageError(
                f"--time {self.time_limit}: tasks stop {self.stop_early_s} s before it, so none "
                "would begin; give more time, or a smaller --stop-early-s"
            )
        if self.gpus is not None and not _GPUS.fullmatch(self.gpus):
            raise UsageError(f"--gpus {self.gpus}: give a number, or type:number such as a100:1")
        for text in (self.name, self.partition or "", *self.further, *self.setup):
            if not text.isprintable():
                raise UsageError(f"{text!r}: line breaks and control characters cannot be used")
        for text in self.further:
            if not text.startswith("-"):
                raise UsageError(f"--sbatch-option {text}: give it as sbatch does: --account=lab")
            if text.startswith(("--array", "-a")):
                # It would win over ours, and shares without a task be left undone in silence.
                raise UsageError(
                    f"--sbatch-option {text}: use --tasks and --max-running, by which the slides "
                    "are dealt out, too"
                )


@dataclass(frozen=True, kw_only=True)
class ArrayJob:
    """An array job as planned: nothing is written before ``write``.

    Attributes:
        folder: Where script, list and logs go; must not hold them yet.
        working_folder: Where the tasks run; relative paths in ``arguments`` start there.
        command: The program, without arguments: ``("/env/bin/bioptimus",)``.
        action: ``embed`` or ``predict``.
        arguments: The action's further options.
        slides: What the tasks deal out among themselves.
        options: What to ask of SLURM.
        environment: Variables that the action takes options from.
    """

    folder: Path
    working_folder: Path
    command: tuple[str, ...]
    action: str
    arguments: tuple[str, ...]
    slides: tuple[SlideInput, ...]
    options: ArrayOptions
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def script(self) -> Path:
        """The sbatch script."""
        return self.folder.absolute() / SCRIPT_NAME

    @property
    def slide_list(self) -> Path:
        """The frozen list of slides."""
        return self.folder.absolute() / LIST_NAME

    @property
    def tasks(self) -> int:
        """Width of the array: never wider than there are slides."""
        return min(self.options.tasks, len(self.slides))

    @property
    def size(self) -> str:
        """Slides and tasks in words."""
        return f"{counted(len(self.slides), 'slide')} in {counted(self.tasks, 'task')}"

    def text(self) -> str:
        """Return the script.

        Raises:
            UsageError: A path holds a line break, or the folder a backslash.
        """
        options = self.options
        if "\\" in str(self.folder.absolute()):
            # SLURM then takes the %A and %a of the log's name as they stand.
            raise UsageError(f"{self.folder}: a job folder with a backslash cannot be used")
        running = "" if options.max_running is None else f"%{options.max_running}"
        log = f"{self.folder.absolute()}/{LOGS_NAME}/".replace("%", "%%") + "%A_%a.log"
        directives = [
            ("--job-name", options.name),
            ("--array", f"1-{self.tasks}{running}"),
            ("--partition", options.partition),
            ("--time", options.time_limit),
            ("--gres", options.gpus and f"gpu:{options.gpus}"),
            ("--cpus-per-task", options.cpus),
            ("--mem", options.memory_gb and f"{options.memory_gb}G"),
            ("--chdir", self.working_folder.absolute()),
            ("--output", log),
            ("--open-mode", "append"),
            ("--signal", f"B:TERM@{options.stop_early_s}"),
        ]
        lines = [f"{name}={_quoted(value)}" for name, value in directives if value is not None]
        lines.append("--requeue" if options.requeue else "--no-requeue")
        lines += options.further
        run = [
            shlex.join([*self.command, self.action]),
            shlex.quote(str(self.slide_list)),
            # Not auto: of tasks that are submitted again, it cannot tell how many there were.
            f'--shard "$SLURM_ARRAY_TASK_ID/{self.tasks}"',
            *_option_lines(self.arguments),
        ]
        return "\n".join(
            [
                "#!/bin/bash",
                f"# {self.size}. A task that was stopped goes on where it was: submit",
                f"# the same script again with: sbatch {shlex.quote(str(self.script))}",
                *(f"#SBATCH {line}" for line in lines),
                "",
                *((*options.setup, "") if options.setup else ()),
                *_exports(self.environment),
                "# exec: SLURM's SIGTERM (time limit, preemption, scancel) must reach the program,",
                "# which then writes out what it has computed and gives its slides free.",
                "exec " + " \\\n    ".join(run),
                "",
            ]
        )

    def write(self) -> None:
        """Write script and slide list, and make the folder of the logs.

        Raises:
            UsageError: The folder holds a job already.
            OutputError: It cannot be written, or a file is where the folder of the logs is to be.
        """
        text = self.text()
        refuse_file(self.folder / LOGS_NAME)
        try:
            (self.folder / LOGS_NAME).mkdir(parents=True, exist_ok=True)
            for path in (self.script, self.slide_list):
                if path.exists():
                    raise UsageError(f"{path}: is there already; choose another --job-folder")
            write_list(self.slide_list, self.slides)
            self.script.write_text(text, encoding="utf-8")
            self.script.chmod(0o755)
        except OSError as exc:
            raise OutputError(
                f"{exc.filename or self.folder}: cannot write the job: {exc.strerror}"
            ) from exc

    def submit(self) -> str:
        """Hand the written script to sbatch; return the job's id.

        Raises:
            SubmitError: sbatch is not there, or refused, in its words.
        """
        program = shutil.which("sbatch")
        if program is None:
            raise SubmitError(
                f"sbatch: not found on this machine; the job is written, submit it where it is: "
                f"sbatch {shlex.quote(str(self.script))}"
            )
        done = subprocess.run(
            [program, "--parsable", str(self.script)],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
        if done.returncode != 0:
            raise SubmitError(f"{self.script}: sbatch refused it: {_one_line(done.stderr)}")
        # "4711", or "4711;cluster" where there are several.
        return done.stdout.strip().partition(";")[0]


def _seconds(time_limit: str | None) -> int | None:
    """A time limit as SLURM reads it; None where there is no limit."""
    if time_limit is None or not time_limit[0].isdecimal():
        return None
    days, dash, clock = time_limit.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    # 90 and 90:30 are minutes; behind days the first number is one of hours.
    hours = 0 if len(parts) < 3 and not dash else parts.pop(0)
    minutes, seconds = [*parts, 0, 0][:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _exports(environment: Mapping[str, str]) -> list[str]:
    """Options that the environment sets, for the shell.

    A job may be told to take nothing over from where it was submitted, or be submitted again by
    somebody else: its tasks must not do something else then.
    """
    if not environment:
        return []
    lines = [f"export {name}={shlex.quote(value)}" for name, value in sorted(environment.items())]
    return ["# Options that were set in the environment when the job was made.", *lines, ""]


def _option_lines(arguments: Sequence[str]) -> list[str]:
    """Quote options for the shell, each with its values on a line of its own."""
    lines: list[list[str]] = []
    for word in arguments:
        if word.startswith("-") or not lines:
            lines.append([])
        lines[-1].append(word)
    return [shlex.join(line) for line in lines]


def _quoted(value: object) -> str:
    """Quote a value for an ``#SBATCH`` line, by sbatch's rules, which are not the shell's."""
    text = str(value)
    if not text.isprintable():
        raise UsageError(f"{text!r}: a path with a line break or control character cannot be used")
    if _PLAIN.fullmatch(text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _one_line(text: str) -> str:
    return "; ".join(line.removeprefix("sbatch: error: ") for line in text.strip().splitlines())
