"""OpenSlide as judge: a faster reader is used only where it gives the same pixels."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from bioptimus.errors import SlideReadError
from bioptimus.io.crew import ALONE, Crew
from bioptimus.io.sources import PixelSource

# Side of the squares compared: with 256 px tiles each touches up to four.
_PROBE_PX = 160
# OpenSlide takes level-0 positions and interpolates between pixels of a coarser level where they
# do not meet; nearer than this it does not.
_EXACT_PX = 1 / 512
# Where in a level to look, as shares of its width and height: tissue mostly lies in the middle,
# padded tiles in the last corner. The finest level is what tiles mostly come from.
_PROBES_FINEST = ((0.0, 0.0), (0.5, 0.5), (0.3, 0.6), (1.0, 1.0))
_PROBES = ((0.5, 0.5), (1.0, 1.0))

# x, y, width, height in level pixels.
_Place = tuple[int, int, int, int]


def first_difference(
    fast: PixelSource,
    judge: PixelSource,
    *,
    levels: Sequence[int],
    dimensions: Sequence[tuple[int, int]],
    downsamples: Sequence[float],
    fullest: Mapping[int, tuple[int, int]],
    crew: Crew = ALONE,
) -> str | None:
    """Read a few places of each level both ways.

    Args:
        fast: The reader under test.
        judge: The reader that is right.
        levels: Levels to look at.
        dimensions: (width, height) of each level.
        downsamples: The judge's own downsample of each level.
        fullest: (x, y) of a place with data, of levels that have none elsewhere.
        crew: Who reads.

    Returns:
        Where they differ, in words; None if they agree everywhere. Places that the judge cannot
        read either do not count.
    """
    places = [
        (level, place)
        for level in levels
        for place in _places(
            _PROBES if level else _PROBES_FINEST,
            dimensions[level],
            downsamples[level],
            fullest.get(level),
        )
    ]
    different: list[str] = []

    def compare(probe: tuple[int, _Place]) -> None:
        level, place = probe
        if different:
            return
        try:
            right = judge.read(level, *place)
        except SlideReadError:
            return
        if not np.array_equal(fast.read(level, *place), right):
            different.append(f"level {level} at ({place[0]}, {place[1]})")

    crew.each(compare, places)
    return different[0] if different else None


def _places(
    probes: Sequence[tuple[float, float]],
    size: tuple[int, int],
    downsample: float,
    fullest: tuple[int, int] | None,
) -> Iterator[_Place]:
    most = [max(0, length - _PROBE_PX) for length in size]
    wanted = [(int(x * most[0]), int(y * most[1])) for x, y in probes]
    if fullest is not None:
        wanted.append(fullest)
    seen = set()
    for corner in wanted:
        x, y = (
            _exact_position(length, at, downsample) for length, at in zip(size, corner, strict=True)
        )
        if (x, y) not in seen:
            seen.add((x, y))
            yield x, y, min(_PROBE_PX, size[0] - x), min(_PROBE_PX, size[1] - y)


def _exact_position(length: int, wanted: int, downsample: float) -> int:
    """The position nearest to one wanted that is a whole number of level-0 pixels."""
    positions = np.arange(max(1, length - _PROBE_PX + 1))
    level0 = positions * downsample
    exact = positions[np.abs(level0 - np.round(level0)) <= _EXACT_PX * downsample]
    return int(exact[np.argmin(np.abs(exact - wanted))])
