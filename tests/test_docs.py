"""The documentation builds without a warning, and tells of every command and option."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from cli.main import app
from cli.reference import Entry, entries, is_argument, parameters, render

ROOT = Path(__file__).resolve().parent.parent
ENTRIES = entries(app)


def section(title: str) -> str:
    """The part of the reference about one command, without those below it."""
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", render(app), re.M | re.S)
    assert found, f"no section about {title}"
    return found[1]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.title)
def test_the_reference_tells_of_every_argument_and_option(entry: Entry) -> None:
    text = section(entry.title)
    for parameter in parameters(entry):
        for word in (*parameter.opts, *parameter.secondary_opts):
            name = (parameter.metavar or word.upper()) if is_argument(parameter) else word
            assert re.search(rf"`{re.escape(name)}[` ]", text), f"{entry.title} {name}"
        assert is_argument(parameter) or parameter.help, f"{entry.title} {parameter.name}: no help"


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.title)
def test_help_shows_every_word_about_an_option(entry: Entry) -> None:
    done = CliRunner().invoke(app, [*entry.words, "--help"], env={"COLUMNS": "400"})
    shown = " ".join(done.output.split())
    for parameter in parameters(entry):
        # Words in square brackets would be taken for markup, and left out.
        assert " ".join((parameter.help or "").split()) in shown, parameter.name
        if isinstance(parameter.show_default, str):
            assert f"[default: ({parameter.show_default})]" in shown, parameter.name


def test_every_event_of_a_run_is_in_the_docs() -> None:
    events = {
        event
        for path in (ROOT / "cli").glob("*.py")
        for event in re.findall(r'event(?:_line)?\("(\w+)"', path.read_text())
    }
    told = (ROOT / "docs" / "hpc.md").read_text()
    assert {"run_started", "left_out", "log", "error"} <= events
    assert [event for event in events if f"`{event}`" not in told] == []


def test_every_command_says_what_it_does() -> None:
    for entry in ENTRIES:
        assert (entry.command.help or "").strip(), entry.title


def test_an_option_can_be_set_under_the_name_the_reference_gives(tmp_path: Path) -> None:
    assert "BIOPTIMUS_VIEW_WIDTH_PX" in section("bioptimus view")
    done = CliRunner().invoke(
        app, ["view", str(tmp_path / "none.h5")], env={"BIOPTIMUS_VIEW_WIDTH_PX": "many"}
    )
    assert done.exit_code == 2
    assert "--width-px" in done.output


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.title)
def test_an_options_variable_is_named_after_its_command_and_itself(
    entry: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = get_command(app)
    context = command.context_class(command, info_name="bioptimus", **command.context_settings)
    for word in entry.words:
        command = command.commands[word]  # type: ignore[attr-defined]
        context = command.context_class(command, info_name=word, parent=context)
    for parameter in parameters(entry):
        # Those that print something and end have none.
        if is_argument(parameter) or parameter.is_eager or not parameter.expose_value:
            continue
        option = next(word for word in parameter.opts if word.startswith("--"))
        name = "_".join(["BIOPTIMUS", *entry.words, option[2:]]).upper().replace("-", "_")
        assert f"`{name}`" in section(entry.title)
        monkeypatch.setenv(name, "what the user set")
        assert parameter.resolve_envvar_value(context) == "what the user set", name


PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]


def shell_blocks(page: Path) -> list[str]:
    text = page.read_text().replace("\\\n", " ")
    return re.findall(r"^ *```(?:sh|console)?\n(.*?)^ *```", text, re.M | re.S)


def command_lines(page: Path) -> list[str]:
    """What a page tells people to type: lines of code and code in sentences."""
    text = page.read_text().replace("\\\n", " ")
    blocks = shell_blocks(page)
    prose = re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S)
    code = [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]
    code += [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]
    found = [re.sub(r"^(\$|srun) ", "", line) for line in code]
    return [line for line in found if line.startswith(("bioptimus ", "--"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_tells_of_a_command_or_option_that_does_not_exist(page: Path) -> None:
    options = {
        word
        for entry in ENTRIES
        for parameter in parameters(entry)
        for word in (*parameter.opts, *parameter.secondary_opts)
    } | {"--help"}
    titles = {entry.title for entry in ENTRIES}
    groups = {entry.title for entry in ENTRIES if entry.is_group and entry.words}
    for line in command_lines(page):
        for option in re.findall(r"(?<!\S)--[a-z][\w-]*", line):
            assert option in options, f"{page.name}: {line}"
        words = line.split()
        if words[0] == "bioptimus" and re.fullmatch("[a-z]+", words[1]):
            title = " ".join(words[:2])
            assert title in titles, f"{page.name}: {line}"
            if title in groups and len(words) > 2:
                assert " ".join(words[:3]) in titles, f"{page.name}: {line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_that_installs_the_package_installs_what_its_commands_need(page: Path) -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.findall(r"(?:bioptimus-wsi|pip install '\.)\[([\w,-]+)\]", page.read_text())
    assert {extra for names in named for extra in names.split(",")} <= set(known)
    blocks = "".join(shell_blocks(page))
    if "pip install" in blocks and "bioptimus view" in blocks.partition("pip install")[2]:
        assert re.search(r"pip install \S*\[view\]", blocks), "pictures need the extra 'view'"


def test_every_command_has_a_place_in_the_written_pages() -> None:
    told = " ".join(line for page in PAGES for line in command_lines(page))
    for entry in ENTRIES:
        assert entry.title in told, f"no page shows {entry.title}"


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="needs the extra 'docs'")
    site = tmp_path / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    page = (site / "cli.html").read_text()
    assert "bioptimus view" in page
    assert not (site / "hooks").exists()
    for path in site.rglob("*.html"):
        fetched = re.findall(
            r'(?:src|href)="(https?://[^"]+\.(?:js|css|woff2?))"', path.read_text()
        )
        assert fetched == [], f"{path.name} is readable without network"
