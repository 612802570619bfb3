"""What a slide file says about itself, copied once on opening."""

from collections.abc import Mapping
from dataclasses import dataclass

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
    """

    vendor: str
    level_dimensions: tuple[tuple[int, int], ...]
    properties: Mapping[str, str]
    icc_profile: bytes | None = None
    warnings: tuple[str, ...] = ()

    @property
    def background(self) -> Colour:
        """(r, g, b) of what was not scanned; white if the file names none."""
        text = self.properties.get("openslide.background-color", "")
        try:
            red, green, blue = bytes.fromhex(text)
        except ValueError:
            return WHITE
        return (red, green, blue)
