"""k-means that gives the same clusters each time, numbered by size."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

_SEED = 20_240_607
_RESTARTS = 4
_MAX_ROUNDS = 60
# Starting points are found on a sample; the rounds that follow see every row.
_START_ROWS = 8_192


@dataclass(frozen=True, kw_only=True)
class Clusters:
    """A partition of rows.

    Attributes:
        labels: (N,) int64; 0 is the largest cluster.
        centres: (k, D); k may be less than was asked for where rows repeat.
        sizes: (k,) int64, falling.
    """

    labels: npt.NDArray[np.int64]
    centres: Floats
    sizes: npt.NDArray[np.int64]

    def nearest_rows(self, rows: Floats, *, cluster: int, count: int) -> npt.NDArray[np.int64]:
        """The ``count`` rows of a cluster that lie closest to its centre, closest first."""
        members = np.flatnonzero(self.labels == cluster)
        away = np.square(rows[members] - self.centres[cluster]).sum(axis=1)
        return members[np.argsort(away, kind="stable")[:count]]


def k_means(rows: Floats, count: int) -> Clusters:
    """Partition rows into clusters of small squared distance.

    k-means++ starts, four of them from a fixed seed, and the best kept; the result depends on
    the rows alone.

    Args:
        rows: (N, D).
        count: Number of clusters wanted, at least 1.

    Returns:
        At most ``count`` clusters, none of them empty, the largest first.
    """
    count = min(count, len(rows))
    if count == 0:
        return Clusters(
            labels=np.zeros(0, np.int64),
            centres=np.zeros((0, rows.shape[1]), np.float32),
            sizes=np.zeros(0, np.int64),
        )
    generator = np.random.default_rng(_SEED)
    sample = rows[:: max(1, len(rows) // _START_ROWS)]
    starts = [_refine(sample, _spread(sample, count, generator)) for _ in range(_RESTARTS)]
    best = min(starts, key=lambda centres: float(_distances(sample, centres).min(axis=1).sum()))
    return _by_size(rows, _refine(rows, best))


def _by_size(rows: Floats, centres: Floats) -> Clusters:
    labels = _nearest(rows, centres)
    sizes = np.bincount(labels, minlength=len(centres))
    order = np.argsort(-sizes, kind="stable")
    order = order[sizes[order] > 0]
    rank = np.full(len(centres), -1, np.int64)
    rank[order] = np.arange(len(order))
    return Clusters(
        labels=rank[labels], centres=centres[order], sizes=sizes[order].astype(np.int64)
    )


def _spread(rows: Floats, count: int, generator: np.random.Generator) -> Floats:
    """k-means++: each next start is drawn by squared distance from those there are."""
    chosen = [int(generator.integers(len(rows)))]
    away = _distances(rows, rows[chosen])[:, 0].astype(np.float64)
    while len(chosen) < count:
        total = away.sum()
        point = (
            int(np.searchsorted(away.cumsum(), generator.random() * total, side="right"))
            if total > 0
            else int(generator.integers(len(rows)))
        )
        chosen.append(min(point, len(rows) - 1))
        away = np.minimum(away, _distances(rows, rows[chosen[-1:]])[:, 0])
    return rows[chosen].copy()


def _refine(rows: Floats, centres: Floats) -> Floats:
    """Lloyd's rounds until no row changes sides. A centre left without rows stays put."""
    previous: npt.NDArray[np.int64] | None = None
    for _ in range(_MAX_ROUNDS):
        labels = _nearest(rows, centres)
        if previous is not None and np.array_equal(labels, previous):
            break
        previous = labels
        sums = _sums(rows, labels, len(centres))
        sizes = np.bincount(labels, minlength=len(centres))
        held = sizes > 0
        centres = centres.copy()
        centres[held] = (sums[held] / sizes[held, None]).astype(np.float32)
    return centres


def _sums(rows: Floats, labels: npt.NDArray[np.int64], count: int) -> Floats:
    """(k, D) sums of each cluster's rows, as one product: far faster than adding by index."""
    members = np.zeros((count, len(rows)), np.float32)
    members[labels, np.arange(len(rows))] = 1
    sums: Floats = members @ rows
    return sums


def _nearest(rows: Floats, centres: Floats) -> npt.NDArray[np.int64]:
    """(N,) number of the closest centre. A row's own length is the same for all of them."""
    half = np.square(centres).sum(axis=1) / 2
    nearest: npt.NDArray[np.int64] = (rows @ centres.T - half).argmax(axis=1)
    return nearest


def _distances(rows: Floats, centres: Floats) -> Floats:
    """(N, k) squared distances, never negative."""
    products = rows @ centres.T
    lengths = np.square(rows).sum(axis=1)[:, None] + np.square(centres).sum(axis=1)[None, :]
    distances: Floats = np.maximum(lengths - 2 * products, 0)
    return distances
