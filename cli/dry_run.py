"""``--dry-run``: open every slide and say what a run would do; write nothing."""

from typing import TYPE_CHECKING

import typer

from bioptimus.counting import counted
from cli.progress import without_name

if TYPE_CHECKING:
    from bioptimus.batch.run import RunConfig


def show_plan(config: "RunConfig") -> int:
    """Print one line per slide: mpp, its source, level, tiles, output size.

    Returns:
        0, or 1 if a slide would fail.
    """
    from bioptimus.batch.preview import preview

    failed = False
    total_tiles = total_bytes = count = 0
    for each in preview(config):
        count += 1
        if each.error:
            failed = True
            typer.echo(f"{each.name}: would fail: {without_name(each.error, each.name)}")
            continue
        total_tiles += each.tiles
        total_bytes += each.output_bytes
        typer.echo(
            f"{each.name}: {counted(each.tiles, 'tile')}, "
            f"mpp {each.mpp[0]:.4g} ({each.mpp_source}), "
            f"level {each.level} (downsample {each.level_downsample:.4g}), "
            f"{each.output_bytes / 1e6:.1f} MB -> {each.output}"
        )
    typer.echo(
        f"{counted(count, 'slide')}, {counted(total_tiles, 'tile')}, "
        f"{total_bytes / 1e6:.1f} MB; nothing written"
    )
    return 1 if failed else 0
