"""The documentation builds without a warning, and tells of every command and option."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
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
