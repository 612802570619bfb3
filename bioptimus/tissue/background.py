"""The colour of the bare glass, estimated from the slide itself."""

from dataclasses import dataclass

import cv2
import numpy as np
import numpy.typing as npt

from bioptimus.blas import ONE_THREAD_PRODUCT

# Where a slide shows no glass at all, its glass is taken to be as bright as that of most scanners.
USUAL_GLASS = 243.0
# Glass is smooth (grey levels of difference to its neighbours' mean), bright and nearly grey.
SMOOTH = 2.5
DIMMEST_GLASS = 150.0
WIDEST_TINT = 30.0
# A brightness counts as one of glass when so much of the commonest one's area has it. The
# brightest such is glass: pale tissue is dimmer, and lumina show glass in a slide full of tissue.
SHARE_OF_COMMONEST = 0.02
# Parts never scanned are stored by some as one white, brighter than the glass.
FILL_LEVEL = 252
# Illumination may fall off by so much before a grey gradient stops being glass.
SURFACE_RANGE = (0.70, 1.15)
# The slide is cut in 8 x 8 cells; glass must show in so many of them before a surface is fitted.
CELLS = 8
CELLS_WITH_GLASS = 0.35
# So many points times 6 x 6 terms; more of them fit no better.
MOST_POINTS = 5_000


@dataclass(frozen=True, kw_only=True)
class Background:
    """Colour of the glass at each place of the coarse image.

    Attributes:
        colour: (3,) RGB of the glass where most of it was seen.
        surface: (6, 3) coefficients of 1, u, v, u², uv, v² with u and v from -1 to 1 over the
            image's width and height, as factors of ``colour``.
        seen: Share of the scanned area that looked like glass, 0..1.
    """

    colour: npt.NDArray[np.float32]
    surface: npt.NDArray[np.float32] | None
    seen: float

    def rows(
        self, start: int, stop: int, *, size: tuple[int, int]
    ) -> list[npt.NDArray[np.float32]]:
        """Glass colour of some rows of an image.

        Args:
            start: First row.
            stop: Row after the last.
            size: (width, height) of the image.

        Returns:
            Red, green and blue, each float32 (stop - start, width), or (1, 1) where the colour is
            the same all over.
        """
        if self.surface is None:
            return [self.colour[channel].reshape(1, 1) for channel in range(3)]
        u = _positions(size[0])
        v = _positions(size[1])[start:stop]
        powers_of_v = np.stack([np.ones_like(v), v, v * v], axis=1)
        step = max(1, ONE_THREAD_PRODUCT // (3 * size[0]))
        planes = []
        for channel in range(3):
            c = self.surface[:, channel]
            along_u = np.stack([c[0] + c[1] * u + c[3] * u * u, c[2] + c[4] * u, c[5] + 0 * u])
            factor = np.empty((stop - start, size[0]), np.float32)
            for row in range(0, len(factor), step):
                place = slice(row, row + step)
                np.matmul(powers_of_v[place], along_u, out=factor[place])
            np.clip(factor, *SURFACE_RANGE, out=factor)
            factor *= self.colour[channel]
            planes.append(factor)
        return planes


def estimate_background(
    pixels: npt.NDArray[np.uint8], scanned: npt.NDArray[np.bool_]
) -> Background:
    """Estimate the colour of the glass.

    Args:
        pixels: RGB (height, width, 3), best at a reduced scale where noise has averaged out.
        scanned: (height, width) true where the pixels are those of the scan.

    Returns:
        The estimate; a usual white where no glass is seen.
    """
    red, green, blue = cv2.split(pixels)
    least = cv2.min(cv2.min(red, green), blue)
    tint = cv2.subtract(cv2.max(cv2.max(red, green), blue), least)
    grey = np.asarray(cv2.transform(pixels.astype(np.float32), np.full((1, 3), 1 / 3)), np.float32)
    rough = cv2.blur(np.abs(grey - cv2.blur(grey, (3, 3))), (3, 3))
    smooth = scanned & (rough <= SMOOTH)
    glass = smooth & (tint <= WIDEST_TINT) & (grey >= DIMMEST_GLASS)
    area = int(scanned.sum())
    enough = max(16, 0.0005 * area)
    fill = glass & (rough == 0) & (np.asarray(least) >= FILL_LEVEL)
    if (glass & ~fill).sum() >= max(enough, 0.02 * area):
        glass &= ~fill
        smooth &= ~fill
    if glass.sum() < enough:
        return Background(colour=np.full(3, USUAL_GLASS, np.float32), surface=None, seen=0.0)
    brightness = _brightest_common(grey[glass])
    like = glass & (np.abs(grey - brightness) <= 8)
    colour = np.median(pixels[like], axis=0).astype(np.float32)
    through = pixels / colour
    shares = cv2.split(through)
    spread = cv2.subtract(
        cv2.max(cv2.max(shares[0], shares[1]), shares[2]),
        cv2.min(cv2.min(shares[0], shares[1]), shares[2]),
    )
    shaded = smooth & (spread <= 0.05) & (grey >= SURFACE_RANGE[0] * brightness)
    return Background(
        colour=colour,
        surface=_fit_surface(through, shaded),
        seen=float(shaded.sum()) / max(area, 1),
    )


def _brightest_common(grey: npt.NDArray[np.float32]) -> float:
    """The brightest grey level that much of the area has."""
    counts = np.bincount(grey.astype(np.int64), minlength=256).astype(np.float64)
    counts = np.convolve(counts, np.ones(5) / 5, mode="same")
    common = np.flatnonzero(counts >= SHARE_OF_COMMONEST * counts.max())
    top = int(common[-1])
    # From there downhill to the peak that this level is the shoulder of.
    while top > 0 and counts[top - 1] >= counts[top]:
        top -= 1
    return float(top)


def _fit_surface(
    through: npt.NDArray[np.float32], glass: npt.NDArray[np.bool_]
) -> npt.NDArray[np.float32] | None:
    """Fit a quadratic to the glass, leaving out what lies off it; None where too little shows."""
    height, width = glass.shape
    cells = cv2.resize(
        glass.astype(np.float32),
        (min(CELLS, width), min(CELLS, height)),
        interpolation=cv2.INTER_AREA,
    )
    if (cells > 0.1).mean() < CELLS_WITH_GLASS:
        return None
    rows, columns = np.nonzero(glass)
    step = max(1, len(rows) // MOST_POINTS)
    rows, columns = rows[::step], columns[::step]
    u, v = _positions(width)[columns], _positions(height)[rows]
    terms = np.stack([np.ones_like(u), u, v, u * u, u * v, v * v], axis=1).astype(np.float64)
    values = through[rows, columns].astype(np.float64)
    keep = np.ones(len(rows), dtype=bool)
    # A little pull towards a flat surface, for terms that the glass seen does not determine.
    pull = np.diag([0.0, 1, 1, 1, 1, 1])
    fitted: npt.NDArray[np.float64] = np.zeros((6, 3))
    for _ in range(4):
        a, b = terms[keep], values[keep]
        normal = a.T @ a + 1e-3 * len(a) * pull + 1e-9 * np.eye(6)
        fitted = np.linalg.solve(normal, a.T @ b).astype(np.float64)
        off = np.abs(values - terms @ fitted).max(axis=1)
        keep = off <= max(0.015, 3 * float(np.median(off)))
    return fitted.astype(np.float32)


def _positions(count: int) -> npt.NDArray[np.float32]:
    """Pixel centres as -1..1."""
    return ((np.arange(count, dtype=np.float32) + 0.5) / count * 2 - 1).astype(np.float32)
