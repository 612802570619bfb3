"""The mask of a slide's tissue and what made it, as plain data."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from bioptimus.errors import UsageError
from bioptimus.kinds import check_kinds

# A coarse pixel that the scanner covered by less than half is not part of the scan.
SCANNED_OPACITY = 128
# Name of the step that drops what is too small.
SPECKS = "specks"


@dataclass(frozen=True, kw_only=True)
class TissueOptions:
    """How tissue is looked for.

    Attributes:
        method: ``auto`` looks for stain; ``none`` takes the whole scanned area.
        keep_pen: Count pen marks as tissue rather than remove them.
        min_object_um2: Smaller islands are dropped. The default is a square of 200 µm: about
            three tiles of 112 µm, well below a needle biopsy's fragments.
        max_hole_um2: Smaller holes are filled: glands, vessels, fat cells and small tears, but
            not the glass between folds. The default is a square of 250 µm.
    """

    method: Literal["auto", "none"] = "auto"
    keep_pen: bool = False
    min_object_um2: float = 40_000.0
    max_hole_um2: float = 62_500.0

    def __post_init__(self) -> None:
        """Refuse areas below zero.

        Raises:
            UsageError: An area is negative or not a number, or a value is of another kind.
        """
        check_kinds(self)
        for name, value in (("object", self.min_object_um2), ("hole", self.max_hole_um2)):
            if not value >= 0:
                raise UsageError(f"smallest {name} of {value} µm²: must be 0 or more")


@dataclass(frozen=True, kw_only=True)
class TissueStep:
    """What one step left.

    Attributes:
        name: What the step did, in a few words.
        share: Share of the whole coarse image that is still in the mask after it, 0..1.
    """

    name: str
    share: float


@dataclass(frozen=True, kw_only=True)
class TissueMask:
    """Where the tissue of a slide is.

    Attributes:
        mask: Boolean array (height, width); true is tissue.
        downsample: (x, y) level-0 pixels per mask pixel; the mask's corner is the slide's.
        method: ``auto``, ``none``, ``file``, ``file and auto`` or ``model``.
        steps: What each step left, in order; empty where there were none.
        classes: Of annotations in a file: the names of those that count as tissue.
    """

    mask: npt.NDArray[np.bool_]
    downsample: tuple[float, float]
    method: str
    steps: tuple[TissueStep, ...] = ()
    classes: tuple[str, ...] = ()

    @property
    def share(self) -> float:
        """Share of the mask that is tissue, 0..1."""
        return float(self.mask.mean()) if self.mask.size else 0.0

    @property
    def emptied_by(self) -> str | None:
        """Name of the step that left nothing; None where some tissue is left."""
        for step in self.steps:
            if step.share == 0:
                return step.name
        return None if self.mask.any() else self.method


def full_mask(opaque: npt.NDArray[np.uint8], downsample: tuple[float, float]) -> TissueMask:
    """The whole scanned area, for slides whose every tile is wanted.

    Args:
        opaque: (height, width) share of each coarse pixel that was scanned, 0..255.
        downsample: (x, y) level-0 pixels per coarse pixel.

    Returns:
        A mask with method ``none``, true where at least half of a pixel was scanned.
    """
    mask = opaque >= SCANNED_OPACITY
    step = TissueStep(name="area outside the scan", share=float(mask.mean()))
    return TissueMask(mask=mask, downsample=downsample, method="none", steps=(step,))
