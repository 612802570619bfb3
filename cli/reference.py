"""The command-line reference in Markdown, made from the commands themselves.

The documentation is built with it, so an option cannot be missing there.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import typer

# Typer keeps its own command classes and gives no public names for them: what is read here
# (name, opts, help, …) is the part that every version has.
AnyCommand = Any
AnyParameter = Any


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One command as users type it.

    Attributes:
        words: Such as ``("models", "show")``; empty for the program itself.
        command: Typer's command.
    """

    words: tuple[str, ...]
    command: AnyCommand

    @property
    def title(self) -> str:
        """The whole line, such as ``bioptimus models show``."""
        return " ".join(("bioptimus", *self.words))

    @property
    def is_group(self) -> bool:
        """Whether it only holds other commands."""
        return bool(getattr(self.command, "commands", None))


def entries(app: typer.Typer) -> list[Entry]:
    """Every command, groups before what they hold, in the order of ``--help``."""
    return list(_walk((), typer.main.get_command(app)))


def _walk(words: tuple[str, ...], command: AnyCommand) -> Iterator[Entry]:
    if command.hidden:
        return
    yield Entry(words=words, command=command)
    for name, inner in getattr(command, "commands", {}).items():
        yield from _walk((*words, name), inner)


def parameters(entry: Entry) -> list[AnyParameter]:
    """Arguments and options that are not hidden, in the order in which they are declared."""
    return [each for each in entry.command.params if not getattr(each, "hidden", False)]


def is_argument(parameter: AnyParameter) -> bool:
    """Whether it has a place instead of a name."""
    return not any(word.startswith("-") for word in parameter.opts)


def render(app: typer.Typer) -> str:
    """The reference as one Markdown page."""
    parts = [
        "# Command line",
        "Made from the commands themselves; `bioptimus COMMAND --help` says the same. Results go "
        "to standard output, progress and errors to standard error. Every option can be set in "
        "the environment, under the name given below it.",
        "Exit codes: 0 all done, 1 something failed, 2 wrong usage, 130, 143 and 129 stopped "
        "by Ctrl-C, SIGTERM and SIGHUP.",
    ]
    parts += [_section(entry) for entry in entries(app)]
    return "\n\n".join(parts) + "\n"


def _section(entry: Entry) -> str:
    level = "##" if len(entry.words) < 2 else "###"
    parts = [f"{level} {entry.title}", _usage(entry), _prose(entry.command.help or "")]
    if entry.is_group and entry.words:
        inner = [f"`{entry.title} {name}`" for name in entry.command.commands]
        parts.append("Commands: " + ", ".join(inner) + ".")
    panels: dict[str, list[str]] = {}
    for parameter in parameters(entry):
        heading = "Arguments" if is_argument(parameter) else parameter.rich_help_panel or "Options"
        panels.setdefault(heading, []).append(_row(entry, parameter))
    for heading, rows in panels.items():
        head = f"| {heading} | | |\n| --- | --- | --- |"
        parts.append("\n".join([head, *rows]))
    return "\n\n".join(part for part in parts if part)


def _usage(entry: Entry) -> str:
    words = [entry.title]
    if any(not is_argument(parameter) for parameter in parameters(entry)):
        words.append("[OPTIONS]")
    if entry.is_group:
        words.append("COMMAND …")
    for parameter in parameters(entry):
        if is_argument(parameter):
            shown = parameter.metavar or parameter.name.upper()
            shown += " …" if parameter.nargs != 1 and "..." not in shown else ""
            words.append(shown if parameter.required else f"[{shown}]")
    return f"```text\n{' '.join(words)}\n```"


def _prose(text: str) -> str:
    """A docstring's paragraphs, its lines joined."""
    paragraphs = text.strip().split("\n\n")
    return "\n\n".join(" ".join(line.split()) for line in paragraphs)


def _row(entry: Entry, parameter: AnyParameter) -> str:
    if is_argument(parameter):
        names = f"`{parameter.metavar or parameter.name.upper()}`"
    else:
        value = _value(parameter)
        names = ", ".join(f"`{word}{value}`" for word in parameter.opts)
        if parameter.secondary_opts:
            names += " / " + ", ".join(f"`{word}`" for word in parameter.secondary_opts)
        if parameter.expose_value and not parameter.is_eager:
            names += f"<br><small>`{_environment(entry, parameter)}`</small>"
    cells = (names, _default(parameter), _cell(parameter.help or ""))
    return "| " + " | ".join(cells) + " |"


def _environment(entry: Entry, parameter: AnyParameter) -> str:
    if parameter.envvar:
        return str(parameter.envvar)
    words = ("bioptimus", *entry.words, parameter.name)
    return "_".join(words).upper().replace("-", "_")


def _value(parameter: AnyParameter) -> str:
    if parameter.is_flag:
        return ""
    if parameter.metavar:
        return f" {parameter.metavar}"
    kind = _kind(parameter)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return " " + "|".join(str(member.value) for member in kind)
    names = {"int": "N", "float": "NUMBER", "str": "TEXT", "Path": "PATH"}
    return " " + names.get(getattr(kind, "__name__", ""), "VALUE")


def _kind(parameter: AnyParameter) -> Any:
    """The annotated type, inside a list."""
    annotation = parameter.type_descriptor.annotation
    inner = getattr(annotation, "__args__", None)
    return inner[0] if inner and parameter.multiple else annotation


def _default(parameter: AnyParameter) -> str:
    if parameter.required:
        return "needed"
    default = parameter.default
    if isinstance(parameter.show_default, str):
        return parameter.show_default
    if default is None or default in ((), []) or parameter.show_default is False:
        return ""
    if isinstance(default, Enum):
        default = default.value
    if isinstance(default, bool):
        if parameter.secondary_opts:
            names = parameter.opts if default else parameter.secondary_opts
            return f"`{names[0]}`"
        return "on" if default else ""
    return f"`{default}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
