"""One self-contained page for a run: what ``bioptimus report OUT --html FILE`` writes."""

from pathlib import Path

from bioptimus.counting import Tell, tell_nobody
from bioptimus.errors import OutputError, UsageError
from bioptimus.kinds import checks_kinds


@checks_kinds
def write_html(out: Path, target: Path, *, pictures: bool = True, tell: Tell = tell_nobody) -> int:
    """Write the page about everything under a result folder.

    The page needs no network and no other file. Pictures shrink as slides become more, so that
    thousands of slides stay within some 30 MiB.

    Args:
        out: Folder that ``--out`` named: result files, and ``runs/`` with the run reports.
        target: The page; its folder is made, an older page is replaced at once.
        pictures: Whether thumbnails and embedding maps are drawn, which reads every embedding.
        tell: Called after each file that was read, and each slide that was drawn.

    Returns:
        Number of slides on the page.

    Raises:
        UsageError: The folder is not there.
        OutputError: The folder holds neither results nor reports, or the page cannot be written: a
            folder is in its place, or a file in that of its folder.
    """
    from bioptimus.inference.disk import (
        output_errors,
        refuse_file,
        refuse_folder,
        remove_abandoned,
        written_aside,
    )
    from bioptimus.report_html.collect import collect
    from bioptimus.report_html.page import render
    from bioptimus.report_html.pictures import draw_all

    if not out.is_dir():
        raise UsageError(f"{out}: no such folder; give the folder that --out named")
    refuse_file(target.parent)
    refuse_folder(target)
    run = collect(out, tell)
    if not run.slides and not run.runs:
        raise OutputError(f"{out}: holds neither result files nor runs/*.json")
    text = render(run, draw_all(run, tell) if pictures else {})
    with output_errors(target, "cannot be written"):
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned([target])
        with written_aside(target) as temporary:
            # Names of files need not be in UTF-8.
            temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
    return len(run.slides)
