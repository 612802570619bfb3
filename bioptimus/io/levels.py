"""Which stored level a tile is read from: pure arithmetic over downsamples."""

from collections.abc import Sequence
from dataclasses import dataclass

from bioptimus.errors import ResolutionError

# Pyramids are rarely exact (4.0058, 3.994) and scanners round mpp in the third decimal: a level
# this little coarser than wanted is the same scale.
SAME_SCALE_TOLERANCE = 0.02


@dataclass(frozen=True, kw_only=True)
class LevelChoice:
    """A level and what remains to be scaled.

    Attributes:
        level: Index into the stored pyramid, 0 = largest.
        scale: (x, y) pixels of that level per pixel wanted; below 1 means upsampling.
    """

    level: int
    scale: tuple[float, float]


def choose_level(
    downsamples: Sequence[tuple[float, float]],
    wanted: tuple[float, float],
    *,
    name: str = "slide",
    allow_upsample: bool = False,
) -> LevelChoice:
    """The coarsest level that is not coarser than wanted.

    Args:
        downsamples: (x, y) level-0 pixels per pixel of each level, level 0 first.
        wanted: (x, y) level-0 pixels per pixel wanted.
        name: The slide's name, for the message.
        allow_upsample: Read level 0 when even that is too coarse.

    Returns:
        The level and the (x, y) scale that remains.

    Raises:
        ResolutionError: Level 0 is coarser than wanted beyond the tolerance.
    """
    fitting = [
        level
        for level, downsample in enumerate(downsamples)
        if all(
            have <= want * (1 + SAME_SCALE_TOLERANCE)
            for have, want in zip(downsample, wanted, strict=True)
        )
    ]
    if not fitting and not allow_upsample:
        raise ResolutionError(
            f"{name}: its finest level is {max(1 / w for w in wanted):.3g} times coarser than the "
            "tile's mpp; use a model for coarser tiles, or pass --allow-upsample"
        )
    level = max(fitting, key=lambda index: downsamples[index], default=0)
    x, y = downsamples[level]
    return LevelChoice(level=level, scale=(wanted[0] / x, wanted[1] / y))


def finer_levels(downsamples: Sequence[tuple[float, float]], level: int) -> list[int]:
    """The level and every finer one, coarsest first: where to look when one is damaged."""
    chosen = downsamples[level]
    finer = [index for index, entry in enumerate(downsamples) if entry <= chosen]
    return sorted(finer, key=lambda index: downsamples[index], reverse=True)
