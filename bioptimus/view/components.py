"""Principal components of embeddings, in bounded memory and with a stable sign and order."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

SAMPLE_ROWS = 16_384
"""Rows that a fit looks at. The error of a component's direction falls with the square root of
this number; the eye cannot tell the colours of 16,384 rows from those of all."""

MAX_COMPONENTS = 32
"""What clustering uses; a map uses three."""

# The sum of squares of larger values may not fit into float32.
_LARGEST_SQUARED = 1e15

# A hundredth of the tiles at either end may saturate: one folded or inked tile must not turn
# the rest of the slide into one colour.
_RANGE_PERCENTILES = (1.0, 99.0)


@dataclass(frozen=True, kw_only=True)
class Components:
    """A fitted projection.

    Attributes:
        mean: (D,) of the rows fitted on.
        axes: (k, D), orthonormal, by falling variance; in each the largest loading by
            magnitude is positive, so that two fits of the same rows give the same colours.
        share: (k,) of the variance of the rows that each axis explains, 0..1.
        low: (k,) first percentile of the rows' scores.
        high: (k,) last percentile of the rows' scores.
    """

    mean: Floats
    axes: Floats
    share: Floats
    low: Floats
    high: Floats

    @classmethod
    def fit(cls, rows: Floats, *, count: int = MAX_COMPONENTS) -> Self:
        """Find the directions in which rows differ most.

        Args:
            rows: (n, D); n × D floats are copied once.
            count: Number of components wanted.

        Returns:
            min(count, n - 1, D) components or fewer: directions without variance are left out.
            None at all for fewer than two distinct rows.
        """
        mean = (rows.sum(axis=0, dtype=np.float64) / max(1, len(rows))).astype(np.float32)
        centred = rows - mean
        variances, axes = _leading(centred, count)
        scores = centred @ axes.T
        total = float(np.square(centred, dtype=np.float64).sum()) / max(1, len(rows) - 1)
        if not len(axes):
            low = high = np.zeros(0, np.float32)
        else:
            low, high = np.percentile(scores, _RANGE_PERCENTILES, axis=0).astype(np.float32)
        share = (variances / total if total else variances).astype(np.float32)
        return cls(mean=mean, axes=axes, share=share, low=low, high=high)

    def project(self, blocks: Iterable[Floats], *, count: int) -> Floats:
        """Scores of rows that come block by block.

        Args:
            blocks: Arrays (n, D); one is in memory at a time.
            count: Number of components wanted.

        Returns:
            (N, count); columns beyond the components there are hold zeros.
        """
        axes = np.ascontiguousarray(self.axes[:count].T)
        parts = [(block - self.mean) @ axes for block in blocks]
        found = np.concatenate(parts) if parts else np.zeros((0, axes.shape[1]), np.float32)
        scores = np.zeros((len(found), count), np.float32)
        scores[:, : axes.shape[1]] = found
        return scores

    def unit_scores(self, scores: Floats) -> Floats:
        """Map scores to 0..1 by the percentiles of the fit; 0.5 where nothing varies.

        Args:
            scores: (N, k) as :meth:`project` gives them.

        Returns:
            (N, k) float32, clipped to 0..1.
        """
        result = np.full(scores.shape, 0.5, np.float32)
        for column in range(min(scores.shape[1], len(self.low))):
            low, high = self.low[column], self.high[column]
            if high > low:
                result[:, column] = np.clip((scores[:, column] - low) / (high - low), 0, 1)
        return result


def every_nth(blocks: Iterable[Floats], step: int) -> Iterator[Floats]:
    """Rows 0, step, 2 step, … of a sequence of blocks, as copies in float32."""
    start = 0
    for block in blocks:
        yield np.array(block[start::step], np.float32)
        start = (start - len(block)) % step


def sample_step(count: int, *, wanted: int = SAMPLE_ROWS) -> int:
    """Smallest step that leaves at most ``wanted`` of ``count`` rows."""
    return max(1, -(-count // wanted))


def _leading(centred: Floats, count: int) -> tuple[npt.NDArray[np.float64], Floats]:
    """Largest eigenvalues of the covariance, falling, and their unit vectors (k, D).

    Works on the smaller of the two product matrices, so a slide of ten tiles does not pay for
    a D × D problem.
    """
    rows, width = centred.shape
    if rows < 2:
        return np.zeros(0), np.zeros((0, width), np.float32)
    extent = float(np.abs(centred).max(initial=0.0))
    scale = extent if extent > _LARGEST_SQUARED else 1.0
    if scale != 1.0:
        centred = centred / np.float32(scale)
    wide = rows < width
    product = (centred @ centred.T if wide else centred.T @ centred).astype(np.float64)
    values, vectors = np.linalg.eigh(product / (rows - 1))
    values *= scale**2
    count = min(count, rows - 1, width)
    values, vectors = values[::-1][:count], vectors[:, ::-1][:, :count]
    # Below float32's rounding of the largest, a direction is noise of the arithmetic.
    kept = values > max(float(values[0]), 0.0) * 1e-6
    values, vectors = values[kept], vectors[:, kept]
    axes = (centred.T @ vectors).T if wide else vectors.T
    axes = axes / np.maximum(np.linalg.norm(axes, axis=1, keepdims=True), 1e-30)
    largest = np.abs(axes).argmax(axis=1)
    axes = axes * np.where(axes[np.arange(len(axes)), largest] < 0, -1.0, 1.0)[:, None]
    return values, np.ascontiguousarray(axes, np.float32)
