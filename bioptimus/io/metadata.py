"""What a slide file says about itself, copied once on opening."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bioptimus.io.sources import WHITE, Colour


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """What is copied from the file on opening, so that a dead handle takes nothing with it.

    Attributes:
        vendor: OpenSlide's name of the format.
        level_dimensions: (width, height) of each level.
        properties: As OpenSlide names them.
        icc_profile: The embedded colour profile.
        warnings: What a user should know, one sentence each.
        stated_downsamples: Of each level, as the format itself states it; None where it does not,
            and for levels beyond the last.
        stored: (rows, columns) of the stored tiles of level 0: false where the scanner left one
            out, though coarser levels have pixels there. None where it left out none.
    """

    vendor: str
    level_dimensions: tuple[tuple[int, int], ...]
    properties: Mapping[str, str]
    icc_profile: bytes | None = None
    warnings: tuple[str, ...] = ()
    stated_downsamples: tuple[float | None, ...] = ()
    stored: npt.NDArray[np.bool_] | None = None

    @property
    def level_downsamples(self) -> tuple[tuple[float, float], ...]:
        """(x, y) level-0 pixels per pixel of each level.

        As stated, since such levels end in part of a pixel, or with padding, and their sizes then
        tell a scale that is a little off: a pixel at the far edge. Else as the sizes tell.
        """
        width, height = self.level_dimensions[0]
        stated = (*self.stated_downsamples, *[None] * len(self.level_dimensions))
        return tuple(
            (width / size[0], height / size[1]) if by is None else (by, by)
            for size, by in zip(self.level_dimensions, stated, strict=False)
        )

    @property
    def background(self) -> Colour:
        """(r, g, b) of what was not scanned; white if the file names none."""
        text = self.properties.get("openslide.background-color", "")
        try:
            red, green, blue = bytes.fromhex(text)
        except ValueError:
            return WHITE
        return (red, green, blue)
