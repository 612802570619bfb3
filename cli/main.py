"""The ``bioptimus`` command: one Typer app, one place that turns errors into exit codes."""

import difflib
import errno
import logging
import os
import re
import resource
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Annotated, Any, TextIO

import typer

from bioptimus.errors import BioptimusError, UsageError, in_our_words
from cli import convert, doctor, embed, info, models, predict, report, submit, tiles, verify, view
from cli.progress import JsonLines, drop_unsaid, event_line, one_line

logger = logging.getLogger(__name__)

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

# As many as every system takes; macOS has no more for one process.
_OPEN_FILES = 10_240

_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

app = typer.Typer(
    name="bioptimus",
    help="Whole-slide images to embeddings and predictions.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={
        "help_option_names": ["-h", "--help"],
        # Every option can be set in the environment: BIOPTIMUS_EMBED_OUT, and so on.
        "auto_envvar_prefix": "BIOPTIMUS",
    },
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from bioptimus import __version__

        typer.echo(f"bioptimus {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Log more, and show the traceback of an error.")
    ] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Whole-slide images to embeddings and predictions.

    An independent implementation, not affiliated with Bioptimus.
    """
    _log_to_stderr(verbose=verbose, as_json=bool(context.obj))
    if name := context.invoked_subcommand:
        commands: dict[str, Any] = vars(context.command)["commands"]
        for line in _variables_of_no_option(commands[name], f"BIOPTIMUS_{name.upper()}"):
            logger.warning("%s", line)


def _variables_of_no_option(command: Any, prefix: str) -> Iterator[str]:
    """Tell of variables that look like an option's of this command and are none, if misspelt."""
    known = _variables(command, prefix)
    for variable in sorted(os.environ):
        if variable.startswith(f"{prefix}_") and variable not in known:
            near = difflib.get_close_matches(variable, known, n=1)
            meant = f"; is {near[0]} meant?" if near else ""
            yield f"{variable} is set, and sets no option{meant}"


def _variables(command: Any, prefix: str) -> set[str]:
    """Names of the variables that set an option of a command, or of those that it holds."""
    names = {
        parameter.envvar or f"{prefix}_{parameter.name.upper()}" for parameter in command.params
    }
    for name, inner in getattr(command, "commands", {}).items():
        names |= _variables(inner, f"{prefix}_{name.upper()}")
    return names


_SETTINGS: dict[Callable[..., object], dict[str, object]] = {
    submit.submit: submit.CONTEXT_SETTINGS,
}

# Help shows them in this order.
for command in (
    embed.embed,
    predict.predict,
    tiles.tiles,
    info.info,
    view.view,
    report.report,
    verify.verify,
    convert.convert,
    submit.submit,
    doctor.doctor,
):
    app.command(context_settings=_SETTINGS.get(command))(command)
app.add_typer(models.app, name="models")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: What follows the command's name; those of the process if not given.

    Returns:
        The exit code: 0 done, 1 failed, 2 wrong usage, 130 / 143 / 129 stopped by a signal.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    as_json = _wants_json(words)
    verbose = "--verbose" in words
    if verbose:
        # People type it behind the command as well as before.
        words = ["--verbose", *(word for word in words if word != "--verbose")]
    _take_all_files_granted()
    try:
        _refuse_empty(words)
        code = app(args=words, prog_name="bioptimus", standalone_mode=False, obj=as_json)
    except typer.Exit as exc:
        return exc.exit_code
    except (typer.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except BioptimusError as exc:
        if verbose:
            traceback.print_exc()
        code = EXIT_USAGE if isinstance(exc, UsageError) else EXIT_FAILED
        notes = getattr(exc, "__notes__", [])
        _print_error("; ".join([str(exc), *notes]), code, as_json=as_json)
    except OSError as exc:
        if verbose:
            traceback.print_exc()
        # A name that no file can have: typed, or left by a variable that holds something else.
        if exc.errno == errno.ENAMETOOLONG:
            code = EXIT_USAGE
            text = f"{exc.filename}: {exc.strerror}; check the path"
        # One below a folder that the user may not enter: whether it is there cannot be told.
        elif exc.errno == errno.EACCES and exc.filename is not None:
            code = EXIT_USAGE
            text = f"{exc.filename}: {exc.strerror}; check its permissions and its folders'"
        # Whatever has a name told it. This is a log on a full disk, say.
        elif exc.errno in _CANNOT_WRITE and exc.filename is None:
            drop_unsaid()
            code = EXIT_FAILED
            text = f"standard output: {exc.strerror}; send it elsewhere"
        else:
            raise
        _print_error(text, code, as_json=as_json)
    except Exception as exc:
        if known := in_our_words(exc):
            _print_error(known, EXIT_FAILED, as_json=as_json)
            return EXIT_FAILED
        # Typer's own usage errors have a text of their own; anything else is a bug and keeps
        # its traceback.
        if not (hasattr(exc, "format_message") and hasattr(exc, "exit_code")):
            raise
        code = int(exc.exit_code)
        context = getattr(exc, "ctx", None)
        if hasattr(exc, "option_name") and hasattr(exc, "possibilities") and context is not None:
            exc.possibilities = _options_near(exc.option_name, exc.possibilities, context.command)
        # No text: nothing was typed, and the help has been shown.
        if text := exc.format_message():
            hint = f"; see '{context.command_path} --help'" if context else ""
            _print_error(text.rstrip(".") + hint, code, as_json=as_json)
    return code if isinstance(code, int) else 0


def _options_near(typed: str, alike: list[str] | None, command: Any) -> list[str]:
    """Options that may be meant: those spelt alike, and those of which it is a word."""
    known = {name for parameter in command.params for name in parameter.opts}
    word = typed.lstrip("-")
    return sorted({*(alike or ()), *(name for name in known if word in name.split("-"))})


def _take_all_files_granted() -> None:
    """Raise this process's limit of open files to what it may have.

    It begins with 256 on macOS, and a slide of some formats is dozens of files.
    """
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if most == resource.RLIM_INFINITY else min(most, _OPEN_FILES)
    if now != resource.RLIM_INFINITY and now < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def _refuse_empty(words: list[str]) -> None:
    """Refuse an empty word: as a path it would be the working folder, and no other is wanted.

    Raises:
        UsageError: There is one.
    """
    for before, word in zip([None, *words], words, strict=False):
        if not word:
            where = f" after {before}" if before else ""
        elif re.fullmatch("--[a-z0-9-]+=", word):
            where = f" in {word}"
        else:
            continue
        raise UsageError(f"an empty value was given{where}; is a variable of the script not set?")


def _wants_json(words: list[str]) -> bool:
    """Whether a run's events, and so its errors, are to be JSON: known before words are parsed."""
    command = next((word for word in words if not word.startswith("-")), "")
    variable = os.environ.get(f"BIOPTIMUS_{command.upper()}_LOG_JSON", "")
    return "--log-json" in words or variable.lower() in ("1", "true", "t", "yes", "y", "on")


class _ToStderr(logging.StreamHandler[TextIO]):
    """Writes to what stderr is at that moment: a progress display puts itself in its place."""

    def __init__(self, *, level: int) -> None:
        super().__init__()
        self.setLevel(level)

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        """Chosen at each record instead."""


class _Lines(logging.Formatter):
    """One line for a record, and a traceback's below it."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return one_line(super().formatMessage(record))


def _log_to_stderr(*, verbose: bool, as_json: bool) -> None:
    handler = _ToStderr(level=logging.DEBUG if verbose else logging.WARNING)
    handler.setFormatter(JsonLines() if as_json else _Lines("%(levelname)s: %(message)s"))
    for package in ("bioptimus", "cli"):
        logger = logging.getLogger(package)
        logger.handlers = [handler]
        # Also back: a process may run several commands, as tests do.
        logger.setLevel(logging.DEBUG if verbose else logging.NOTSET)


def _print_error(text: str, code: int, *, as_json: bool) -> None:
    line = one_line(f"error: {text}")
    if as_json:
        line = event_line("error", message=text, exit_code=code)
    typer.echo(line, err=True)
