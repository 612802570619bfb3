"""MkDocs calls this while it builds: the command-line page is made from the commands."""

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from cli.main import app
from cli.reference import render


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add ``cli.md``, which no folder holds."""
    files.append(File.generated(config, "cli.md", content=render(app)))
    return files
