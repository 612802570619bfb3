"""``--dry-run``: open every slide and say what a run would do; write nothing."""

from collections import Counter
from typing import TYPE_CHECKING

from bioptimus.counting import counted
from cli.progress import left_out, say, without_name

if TYPE_CHECKING:
    from bioptimus.batch.preview import SlidePreview
    from bioptimus.batch.run import RunConfig


def show_plan(config: "RunConfig") -> int:
    """Print one line per slide: its state, tiles, mpp and its source, level, output size.

    Returns:
        0, or 1 if a slide would fail.
    """
    from bioptimus.batch.preview import preview

    found = preview(config)
    for line in (*(f"WARNING: {note}" for note in found.notes), *left_out(found.skipped)):
        say(line, err=True)
    states: Counter[str] = Counter()
    tiles = size_bytes = 0
    for each in found.slides:
        states[each.state] += 1
        if each.state != "done":
            tiles += each.tiles - each.tiles_done
            size_bytes += each.output_bytes
        for warning in each.warnings:
            say(f"{each.name}: {without_name(warning, each.name)}", err=True)
        say(f"{each.name}: {_line(each)}")
    counts = ", ".join(f"{count} {state}" for state, count in states.items())
    say(
        f"{counted(states.total(), 'slide')}: {counts or 'nothing to do'}; "
        f"{counted(tiles, 'tile')} to compute, {size_bytes / 1e6:.1f} MB; nothing written"
    )
    return 1 if states["would fail"] or states["other parameters"] else 0


def _line(each: "SlidePreview") -> str:
    from bioptimus.io.resolution import mpp_text

    if each.error:
        return f"{each.state}: {without_name(each.error, each.name)}"
    of = f"{each.tiles_done} of " if each.state == "resume" else ""
    done = " done" if each.state == "resume" else ""
    return (
        f"{each.state}, {of}{counted(each.tiles, 'tile')}{done}, "
        f"mpp {mpp_text(each.mpp)} ({each.mpp_source}), "
        f"level {each.level} (downsample {each.level_downsample:.4g}), "
        f"{each.output_bytes / 1e6:.1f} MB -> {each.output}"
    )
