"""Find tissue on a coarse image by its stain."""

import math

import cv2
import numpy as np
import numpy.typing as npt

from bioptimus.kinds import checks_kinds
from bioptimus.tissue.background import Background, estimate_background
from bioptimus.tissue.mask import (
    SCANNED_OPACITY,
    SPECKS,
    TissueMask,
    TissueOptions,
    TissueStep,
    full_mask,
)
from bioptimus.tissue.pen import find_pen
from bioptimus.tissue.stain import STEP, measure_stain

BoolImage = npt.NDArray[np.bool_]
ByteImage = npt.NDArray[np.uint8]

# Which search this is. Raise it with every change to it, to what its options are if not given, or
# to the coarse image that it gets, after which some slide may have other tiles: results tell it,
# and one of another search is refused rather than mixed with those of this one. A cohort that is
# half done is then finished with the version that began it, so not for a change of speed.
SEARCH_VERSION = 1
# Where two stains mix to grey, between stained parts so far apart, darkness is enough.
BRIDGE_UM = 100.0
BRIDGE_DARKNESS = 0.06
# It is also where the stain lies around so much of its border.
ENCLOSED_SHARE = 0.6
# Thinner than this is a fibre or the compression's noise, unless it is surely stained.
THINNEST_UM = 32.0
# Black that reaches the image's edge is a border that a scanner painted.
BLACKEST = 40
# The glass is estimated on an image of about this many pixels a side.
ESTIMATE_PX = 400


@checks_kinds
def find_tissue(
    pixels: npt.NDArray[np.uint8],
    opaque: npt.NDArray[np.uint8],
    *,
    downsample: tuple[float, float],
    mpp: tuple[float, float],
    options: TissueOptions | None = None,
) -> TissueMask:
    """Find the tissue of a slide.

    Args:
        pixels: RGB (height, width, 3) of the whole slide, composited, best at 8 µm/px.
        opaque: (height, width) share of each pixel that was scanned, 0..255.
        downsample: (x, y) level-0 pixels per coarse pixel.
        mpp: (x, y) µm per coarse pixel.
        options: How to look; the defaults if not given.

    Returns:
        The mask and what each step left of it.

    Raises:
        UsageError: A value is of another kind.
    """
    options = options or TissueOptions()
    if options.method == "none":
        return full_mask(opaque, downsample)
    scanned = opaque >= SCANNED_OPACITY
    scanned &= ~_black_border(pixels, scanned)
    steps = [_step("outside the scan or black", scanned)]
    background = _background(pixels, scanned)
    mask = _stained(pixels, scanned, background, mpp)
    steps.append(_step("no stain", mask))
    allowed = scanned
    if not options.keep_pen and mask.any():
        allowed = scanned & ~find_pen(pixels, glass=background.colour, mpp=mpp)
        mask &= allowed
        steps.append(_step("pen marks", mask))
    area_um2 = mpp[0] * mpp[1]
    mask = _cleaned(
        mask,
        smallest_px=options.min_object_um2 / area_um2,
        largest_hole_px=options.max_hole_um2 / area_um2,
    )
    mask &= allowed
    steps.append(_step(SPECKS, mask))
    return TissueMask(mask=mask, downsample=downsample, method="auto", steps=tuple(steps))


def _step(name: str, mask: BoolImage) -> TissueStep:
    return TissueStep(name=name, share=float(mask.mean()) if mask.size else 0.0)


def _background(pixels: ByteImage, scanned: BoolImage) -> Background:
    factor = max(1, math.ceil(max(scanned.shape) / ESTIMATE_PX))
    if factor == 1:
        return estimate_background(pixels, scanned)
    size = (max(1, scanned.shape[1] // factor), max(1, scanned.shape[0] // factor))
    small = cv2.resize(pixels, size, interpolation=cv2.INTER_AREA)
    whole = cv2.resize(scanned.astype(np.uint8), size, interpolation=cv2.INTER_AREA) > 0
    return estimate_background(np.asarray(small, dtype=np.uint8), np.asarray(whole, dtype=bool))


def _stained(
    pixels: ByteImage, scanned: BoolImage, background: Background, mpp: tuple[float, float]
) -> BoolImage:
    """Connected stain, with the grey between."""
    stain = measure_stain(pixels, scanned, background=background, mpp=mpp)
    mask = _connected_to(stain.possible, stain.certain) & scanned
    thick = cv2.morphologyEx(mask.astype(np.uint8), cv2.MORPH_OPEN, _disc(THINNEST_UM, mpp)) > 0
    mask &= np.asarray(thick | stain.certain, dtype=bool)
    closed = cv2.morphologyEx(mask.astype(np.uint8), cv2.MORPH_CLOSE, _disc(BRIDGE_UM, mpp)) > 0
    grey = scanned & (stain.dark >= round(BRIDGE_DARKNESS / STEP))
    mask = np.asarray(mask | (closed & grey), dtype=bool)
    return mask | _enclosed(grey & ~mask, mask)


def _enclosed(grey: BoolImage, mask: BoolImage) -> BoolImage:
    """The pieces of ``grey`` most of whose border is the mask's."""
    count, labels = cv2.connectedComponents(grey.astype(np.uint8), connectivity=4)
    by_mask, by_other = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    before, after = np.s_[:, :-1], np.s_[:, 1:]
    above, below = np.s_[:-1], np.s_[1:]
    for inner, outer in ((before, after), (after, before), (above, below), (below, above)):
        edge = grey[inner] & ~grey[outer]
        label, stained = labels[inner][edge], mask[outer][edge]
        by_mask += np.bincount(label[stained], minlength=count)
        by_other += np.bincount(label[~stained], minlength=count)
    keep = by_mask > ENCLOSED_SHARE * (by_mask + by_other)
    keep[0] = False
    return np.asarray(keep[labels], dtype=bool)


def _disc(diameter_um: float, mpp: tuple[float, float]) -> npt.NDArray[np.uint8]:
    size = [2 * round(diameter_um / 2 / step) + 1 for step in mpp]
    return np.asarray(cv2.getStructuringElement(cv2.MORPH_ELLIPSE, size), dtype=np.uint8)


def _black_border(pixels: ByteImage, scanned: BoolImage) -> BoolImage:
    """Black areas that touch the edge of the image."""
    dark = cv2.inRange(pixels, (0, 0, 0), (BLACKEST, BLACKEST, BLACKEST))
    black = scanned & (np.asarray(dark) > 0)
    if not black.any():
        return black
    _, labels = cv2.connectedComponents(black.astype(np.uint8), connectivity=8)
    edges = [labels[0], labels[-1], labels[:, 0], labels[:, -1]]
    touching = np.unique(np.concatenate(edges))
    return np.asarray(black & np.isin(labels, touching), dtype=bool)


def _connected_to(possible: BoolImage, certain: BoolImage) -> BoolImage:
    """The connected regions of ``possible`` that hold a pixel of ``certain``."""
    count, labels = cv2.connectedComponents(possible.astype(np.uint8), connectivity=8)
    keep = np.zeros(count, dtype=bool)
    keep[labels[certain & possible]] = True
    keep[0] = False
    return np.asarray(keep[labels])


def _cleaned(mask: BoolImage, *, smallest_px: float, largest_hole_px: float) -> BoolImage:
    """With small holes filled and small islands dropped, by their number of pixels.

    By their contours, which touch a small part of the image, rather than by labels of all pixels.
    Contours run through pixels, so by Pick's theorem the area inside, with half of the contour,
    counts the pixels of an island; without it, those of a hole, whose contour is around it.
    """
    image = mask.astype(np.uint8)
    contours, hierarchy = cv2.findContours(image, cv2.RETR_CCOMP, cv2.CHAIN_APPROX_NONE)
    if hierarchy is None:
        return mask
    holes: list[int] = []
    specks: set[int] = set()
    for index, (contour, (_, _, _, parent)) in enumerate(zip(contours, hierarchy[0], strict=True)):
        inside, half = cv2.contourArea(contour), len(contour) / 2
        if parent < 0:
            if inside + half + 1 < smallest_px:
                specks.add(index)
        elif inside - half + 1 <= largest_hole_px:
            holes.append(index)
    # Specks first: one may lie in a hole, and would be cut out of its filling.
    # One by one, since OpenCV goes over all that it is given at each call.
    for index in specks:
        cv2.drawContours(image, [contours[index]], 0, 0, cv2.FILLED)
    for index in holes:
        if int(hierarchy[0][index][3]) not in specks:
            cv2.drawContours(image, [contours[index]], 0, 1, cv2.FILLED)
    return image > 0
