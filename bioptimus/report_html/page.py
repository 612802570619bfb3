"""The page's text: plain HTML that reads without scripts, a small script that sorts and filters."""

import datetime
import html
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from bioptimus import __version__
from bioptimus.report_html.collect import RunData, RunEntry, SlideEntry
from bioptimus.report_html.pictures import SlidePicture

STATES = ("failed", "missing", "stopped", "empty", "skipped", "ok")
"""Worst first: the order in which people want to see them."""

_STATE_WORDS = {
    "ok": "done",
    "empty": "no tissue",
    "skipped": "done before",
    "failed": "failed",
    "stopped": "stopped",
    "missing": "not reached",
}

_COLUMNS = (
    # (key, title, numeric)
    ("picture", "", False),
    ("slide", "Slide", False),
    ("state", "State", False),
    ("tiles", "Tiles", True),
    ("failed", "Failed tiles", True),
    ("mpp", "µm/px", True),
    ("speed", "Tiles/s", True),
    ("seconds", "Seconds", True),
)

# The most frequent ones; the rest stand in the table, which begins with what is not done.
_REASONS_SHOWN = 5

_PARTS = ("open", "tissue", "read", "wait", "forward", "write")


def render(run: RunData, pictures: Mapping[str, SlidePicture]) -> str:
    """The whole page as one string.

    Args:
        run: What is to be shown.
        pictures: Data URIs by slide; slides without any get a row without pictures.
    """
    style = _resource("page.css")
    script = _resource("page.js")
    body = "\n".join(
        [
            _header(run),
            _failures(run.slides),
            _controls(run.slides),
            _table(run.slides, pictures),
            _runs(run),
            _footer(),
        ]
    )
    # Nothing may be fetched, whatever a slide's name holds.
    policy = (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    )
    return (
        "<!doctype html>\n"
        '<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        # Browsers ask the network for an icon unless they are given one.
        '<link rel="icon" href="data:,">\n'
        f"<title>{_(run.out.name or 'Run report')}: slides</title>\n"
        f"<style>\n{style}</style></head>\n<body>\n{body}\n"
        f"<script>\n{script}</script>\n</body></html>\n"
    )


def _resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _(value: object) -> str:
    return html.escape(str(value), quote=True)


def _header(run: RunData) -> str:
    states = Counter(entry.state for entry in run.slides)
    tiles = sum(entry.tiles_done or 0 for entry in run.slides)
    seconds = sum(_total_seconds(entry) for entry in run.slides)
    figures = [
        (f"{len(run.slides):,}", "slide" if len(run.slides) == 1 else "slides"),
        (f"{tiles:,}", "tile" if tiles == 1 else "tiles"),
        (f"{states['failed'] + states['missing'] + states['stopped']:,}", "not done"),
    ]
    if seconds:
        figures.append((_duration(seconds), "of work"))
    cells = "".join(
        f"<div><dt>{_(word)}</dt><dd>{_(figure)}</dd></div>" for figure, word in figures
    )
    models = sorted({entry.model for entry in run.slides if entry.model})
    named = f" · {_(', '.join(models))}" if models else ""
    return (
        f'<header><h1>{_(run.out.name or run.out)}</h1><p class="quiet">{_(run.out)}{named}</p>'
        f'<dl class="figures">{cells}</dl></header>'
    )


def _failures(slides: Sequence[SlideEntry]) -> str:
    """Reasons, each once, with the slides it hit: what somebody has to do something about."""
    by_reason: dict[str, list[SlideEntry]] = {}
    for entry in slides:
        if entry.state in ("failed", "missing", "stopped"):
            by_reason.setdefault(_without_name(entry), []).append(entry)
    if not by_reason:
        return ""
    items = []
    ranked = sorted(by_reason.items(), key=lambda item: -len(item[1]))
    for reason, entries in ranked[:_REASONS_SHOWN]:
        names = ", ".join(Path(entry.slide).name for entry in entries[:6])
        more = f" and {len(entries) - 6} more" if len(entries) > 6 else ""
        items.append(
            f'<li><strong>{_(reason)}</strong><br><span class="quiet">{_(names)}{more}</span></li>'
        )
    if len(ranked) > _REASONS_SHOWN:
        rest = len(ranked) - _REASONS_SHOWN
        items.append(f'<li class="quiet">and {rest:,} more reasons, each in the table below</li>')
    count = sum(map(len, by_reason.values()))
    title = "1 slide is not done" if count == 1 else f"{count:,} slides are not done"
    return f'<section class="failures"><h2>{title}</h2><ul>{"".join(items)}</ul></section>'


def _without_name(entry: SlideEntry) -> str:
    """The reason without the slide's own name in front, so that equal reasons are one."""
    reason = entry.reason or "no reason was recorded"
    for name in (entry.slide, Path(entry.slide).name):
        reason = reason.removeprefix(f"{name}: ")
    return reason


def _controls(slides: Sequence[SlideEntry]) -> str:
    counts = Counter(entry.state for entry in slides)
    buttons = "".join(
        f'<button type="button" class="chip {_(state)}" data-state="{_(state)}" '
        f'aria-pressed="false">{_(_state_word(state))} <b>{counts[state]:,}</b></button>'
        for state in [*STATES, *sorted(set(counts) - set(STATES))]
        if counts[state]
    )
    options = "".join(
        f'<option value="{key}">{_(title)}</option>' for key, title, _n in _COLUMNS if title
    )
    return (
        '<div class="controls" role="search">'
        '<label class="find">Find <input id="find" type="search" placeholder="slide, reason, '
        'model …" autocomplete="off" aria-keyshortcuts="/"></label>'
        f'<div class="chips" role="group" aria-label="Show only these states">{buttons}</div>'
        f'<label class="sort-by">Sort by <select id="sort-by">{options}</select></label>'
        f'<p id="shown" class="quiet" role="status">{len(slides):,} slides</p></div>'
    )


def _table(slides: Sequence[SlideEntry], pictures: Mapping[str, SlidePicture]) -> str:
    heads = []
    for key, title, numeric in _COLUMNS:
        kind = ' class="n"' if numeric else ""
        if not title:
            heads.append(f'<th scope="col"{kind}><span class="hidden">Pictures</span></th>')
            continue
        heads.append(
            f'<th scope="col"{kind} aria-sort="none"><button type="button" data-sort="{key}">'
            f"{_(title)}</button></th>"
        )
    order = {state: place for place, state in enumerate(STATES)}
    ranked = sorted(slides, key=lambda entry: order.get(entry.state, -1))
    shared = _shared_folder(slides)
    rows = "\n".join(
        _row(number, entry, pictures.get(entry.key, SlidePicture()), shared)
        for number, entry in enumerate(ranked)
    )
    return (
        '<table id="slides"><caption class="hidden">Slides of the run</caption>'
        f"<thead><tr>{''.join(heads)}</tr></thead><tbody>\n{rows}\n</tbody></table>"
        '<p id="nothing" hidden>No slide fits. <button type="button" id="clear">Show all'
        "</button></p>"
    )


def _shared_folder(slides: Sequence[SlideEntry]) -> Path:
    """The folder below which all slides lie; what is above it need not be read 1,600 times."""
    parents = {str(Path(entry.slide).parent) for entry in slides}
    try:
        return Path(os.path.commonpath(parents))
    except ValueError:
        # Relative and absolute paths together, or no slide at all.
        return Path()


def _row(number: int, entry: SlideEntry, picture: SlidePicture, shared: Path) -> str:
    path = Path(entry.slide)
    name = path.name or entry.slide
    folder = str(path.parent.relative_to(shared)) if path.is_relative_to(shared) else ""
    above = f'<span class="folder">{_(folder)}/</span>' if folder not in ("", ".") else ""
    planned = entry.tiles_planned
    # A slide that failed before there was a plan has no count, rather than none.
    done = entry.tiles_done if planned or entry.state != "failed" else None
    tiles = "" if done is None else f"{done:,}"
    if done is not None and planned is not None and planned != done + (entry.tiles_failed or 0):
        tiles += f'<span class="quiet"> of {planned:,}</span>'
    seconds = _total_seconds(entry)
    reason = f'<span class="reason">{_(_without_name(entry))}</span>' if entry.reason else ""
    word = _(_state_word(entry.state))
    state = f'<span class="state {_(entry.state)}">{word}</span>'
    cells = [
        ("picture", None, _images(picture)),
        (
            "slide",
            name.casefold(),
            f'<button type="button" class="open" aria-expanded="false" aria-controls="d{number}">'
            f"{above}{_(name)}</button>{reason}",
        ),
        ("state", STATES.index(entry.state) if entry.state in STATES else 99, state),
        ("tiles", done, tiles),
        ("failed", entry.tiles_failed, f"{entry.tiles_failed:,}" if entry.tiles_failed else ""),
        ("mpp", entry.mpp, "" if entry.mpp is None else f"{entry.mpp:.4g}"),
        (
            "speed",
            entry.tiles_per_second,
            "" if not entry.tiles_per_second else f"{entry.tiles_per_second:,.0f}",
        ),
        ("seconds", seconds or None, _bar(entry, seconds) if done else ""),
    ]
    titles = {key: title for key, title, _n in _COLUMNS}
    numeric = {key for key, _t, wanted in _COLUMNS if wanted}
    columns = "".join(
        f'<td class="{key}{" n" if key in numeric else ""}" data-title="{_(titles[key])}"'
        + (f' data-v="{_(value)}"' if value is not None else "")
        + f">{content}</td>"
        for key, value, content in cells
    )
    words = " ".join([entry.slide, entry.reason, entry.model, entry.host, entry.state])
    return (
        f'<tr class="slide" data-state="{_(entry.state)}" data-words="{_(words.casefold())}">'
        f'{columns}</tr>\n<tr class="detail" id="d{number}" hidden><td colspan="{len(_COLUMNS)}">'
        f"{_detail(entry)}</td></tr>"
    )


def _state_word(state: str) -> str:
    return _STATE_WORDS.get(state, state)


def _images(picture: SlidePicture) -> str:
    parts = [
        f'<img src="{uri}" alt="{words}" loading="lazy" decoding="async">'
        for uri, words in ((picture.thumbnail, "slide"), (picture.embedding, "embedding map"))
        if uri
    ]
    return f'<div class="pair">{"".join(parts)}</div>' if parts else ""


def _bar(entry: SlideEntry, seconds: float) -> str:
    """Seconds, with their parts as a strip; the words are in the details."""
    if not seconds:
        return ""
    parts = "".join(
        f'<i class="{part}" style="flex-grow:{entry.seconds[part]:.4g}"></i>'
        for part in _PARTS
        if entry.seconds.get(part)
    )
    return f'{seconds:,.1f}<span class="bar" aria-hidden="true">{parts}</span>'


def _detail(entry: SlideEntry) -> str:
    scale = f"{entry.mpp:.5g} µm/px, from {entry.mpp_source}" if entry.mpp else ""
    facts = [
        ("Slide", entry.slide),
        ("Reason", entry.reason),
        ("Result", entry.output or ""),
        ("Model", entry.model),
        ("Scale", scale.removesuffix(", from ")),
        ("Warnings", "; ".join(entry.warnings)),
        ("Reader", entry.reader),
        ("Machine", " · ".join(part for part in (entry.host, entry.job) if part)),
        ("Run", entry.run),
        ("Versions", _words(entry.versions)),
        ("Parameters", _words(entry.parameters)),
    ]
    listed = "".join(f"<dt>{name}</dt><dd>{_(value)}</dd>" for name, value in facts if value)
    return (
        '<div class="sheet"><div class="large" aria-hidden="true"></div><div>'
        f'<dl class="facts">{listed}</dl>{_times(entry)}{_failed_tiles(entry)}</div></div>'
    )


def _times(entry: SlideEntry) -> str:
    if not entry.seconds:
        return ""
    total = _total_seconds(entry) or 1.0
    known = [part for part in _PARTS if part in entry.seconds]
    rows = "".join(
        f'<tr><th scope="row"><i class="{_(part)}"></i>{_(part)}</th>'
        f'<td class="n">{entry.seconds[part]:,.2f} s</td>'
        f'<td class="n">{entry.seconds[part] / total:.0%}</td></tr>'
        for part in [*known, *sorted(set(entry.seconds) - set(_PARTS))]
    )
    return f'<table class="times"><caption>Time</caption><tbody>{rows}</tbody></table>'


def _failed_tiles(entry: SlideEntry) -> str:
    if not entry.failed_tiles:
        return ""
    rows = "".join(
        f'<tr><td class="n">{x}, {y}</td><td>{_(stage)}</td><td>{_(reason)}</td></tr>'
        for x, y, stage, reason in entry.failed_tiles
    )
    count = entry.tiles_failed or len(entry.failed_tiles)
    shown = len(entry.failed_tiles)
    title = "Failed tiles" if count <= shown else f"First {shown} of {count:,} failed tiles"
    return (
        f'<table class="tiles"><caption>{title}</caption><thead><tr><th scope="col">x, y</th>'
        f'<th scope="col">Stage</th><th scope="col">Reason</th></tr></thead>'
        f"<tbody>{rows}</tbody></table>"
    )


def _runs(run: RunData) -> str:
    if not run.runs and not run.skipped:
        return ""
    items = "".join(_run_item(entry) for entry in run.runs)
    skipped = "".join(
        f"<dt>{_(path)}</dt><dd>{_(reason)}</dd>" for path, reason in run.skipped.items()
    )
    parts = [f"<details><summary>Runs ({len(run.runs)})</summary><ol>{items}</ol></details>"]
    if skipped:
        parts.append(
            f"<details><summary>Files passed over ({len(run.skipped)})</summary>"
            f'<dl class="facts">{skipped}</dl></details>'
        )
    return f'<section class="runs">{"".join(parts)}</section>'


def _run_item(entry: RunEntry) -> str:
    facts = [
        ("Started", entry.started),
        ("Machine", " · ".join(part for part in (entry.host, entry.job) if part)),
        ("Parameters", _words(entry.parameters)),
        ("Versions", _words(entry.versions)),
    ]
    listed = "".join(f"<dt>{name}</dt><dd>{_(value)}</dd>" for name, value in facts if value)
    return f'<li><code>{_(entry.command or entry.run)}</code><dl class="facts">{listed}</dl></li>'


def _footer() -> str:
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    return (
        f'<footer class="quiet">Made {now} by bioptimus-wsi {_(__version__)}, an independent '
        "implementation, not affiliated with Bioptimus. Keys: / find, ↑ ↓ from slide to slide, "
        "Enter details, Esc clear.</footer>"
    )


def _words(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {_plain(value)}" for key, value in _shown(values.items()))


def _shown(items: Iterable[tuple[str, Any]]) -> Iterable[tuple[str, Any]]:
    return ((key, value) for key, value in items if value not in (None, "", [], {}))


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _total_seconds(entry: SlideEntry) -> float:
    if "total" in entry.seconds:
        return entry.seconds["total"]
    return sum(entry.seconds.get(part, 0.0) for part in _PARTS)


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:,.1f} h"
