"""Components, clusters, colours and lattice: what the pictures and the report share."""

import numpy as np
import numpy.typing as npt
import pytest

from bioptimus.view.clusters import k_means
from bioptimus.view.colours import CLUSTER_COLOURS, component_colours, hex_to_rgb
from bioptimus.view.components import Components, every_nth, sample_step
from bioptimus.view.lattice import Lattice

Floats = npt.NDArray[np.float32]


def rows_along(spread: tuple[float, ...], *, count: int = 400, width: int = 12) -> Floats:
    """Rows that vary by ``spread`` along as many random orthogonal directions."""
    generator = np.random.default_rng(5)
    basis, _ = np.linalg.qr(generator.normal(size=(width, len(spread))))
    scores = generator.normal(size=(count, len(spread))) * spread
    rows: Floats = (scores @ basis.T + 3).astype(np.float32)
    return rows


def test_components_are_those_of_a_singular_value_decomposition() -> None:
    rows = rows_along((5, 3, 2, 0.5))
    fitted = Components.fit(rows, count=3)
    _, values, wanted = np.linalg.svd((rows - rows.mean(axis=0)).astype(np.float64))
    for axis, reference in zip(fitted.axes, wanted, strict=False):
        assert abs(float(axis @ reference)) == pytest.approx(1, abs=1e-4)
    np.testing.assert_allclose(
        fitted.share, (values**2 / (values**2).sum())[:3], rtol=1e-3, atol=1e-5
    )


def test_fewer_rows_than_columns_give_the_same_axes() -> None:
    rows = rows_along((5, 3), count=8, width=40)
    fitted = Components.fit(rows, count=3)
    _, _, wanted = np.linalg.svd(rows - rows.mean(axis=0), full_matrices=False)
    assert len(fitted.axes) == 2, "a direction that holds only rounding is left out"
    for axis, reference in zip(fitted.axes, wanted, strict=False):
        assert abs(float(axis @ reference)) == pytest.approx(1, abs=1e-4)


def test_rows_of_very_large_values_have_the_axes_of_small_ones() -> None:
    rows = np.random.default_rng(0).normal(size=(40, 8)).astype(np.float32)
    small, large = (Components.fit(rows * np.float32(by)) for by in (1, 1e25))
    assert np.allclose(small.axes, large.axes, atol=1e-4)
    assert np.allclose(small.share, large.share, atol=1e-4)


def test_sign_and_order_do_not_depend_on_the_order_of_rows() -> None:
    rows = rows_along((5, 3, 2))
    first, second = (Components.fit(each, count=3) for each in (rows, rows[::-1]))
    np.testing.assert_allclose(first.axes, second.axes, atol=1e-4)
    largest = np.abs(first.axes).argmax(axis=1)
    assert (first.axes[np.arange(3), largest] > 0).all()


@pytest.mark.parametrize("count", [0, 1, 2])
def test_few_or_equal_rows_have_a_map_of_one_colour(count: int) -> None:
    rows = np.ones((count, 6), np.float32)
    fitted = Components.fit(rows, count=3)
    units = fitted.unit_scores(fitted.project([rows], count=3))
    assert units.shape == (count, 3)
    assert (units == 0.5).all()


def test_projecting_block_by_block_is_projecting_at_once() -> None:
    rows = rows_along((5, 3, 2))
    fitted = Components.fit(rows, count=3)
    at_once = fitted.project([rows], count=3)
    np.testing.assert_allclose(fitted.project(np.array_split(rows, 7), count=3), at_once, atol=1e-4)


def test_one_stray_row_does_not_take_the_range_from_the_others() -> None:
    rows = rows_along((1, 1, 1))
    rows[7] += 1000
    units = (fitted := Components.fit(rows, count=3)).unit_scores(fitted.project([rows], count=3))
    assert np.ptp(np.delete(units, 7, axis=0)[:, 1]) > 0.9


@pytest.mark.parametrize(("count", "step"), [(0, 1), (10, 1), (11, 2), (100, 10), (101, 11)])
def test_a_sample_keeps_every_nth_row_across_blocks(count: int, step: int) -> None:
    assert sample_step(count, wanted=10) == step
    rows = np.arange(count, dtype=np.float32)[:, None]
    kept = list(every_nth(np.array_split(rows, 3), step))
    np.testing.assert_array_equal(np.concatenate(kept), rows[::step])


def clouds(sizes: tuple[int, ...]) -> Floats:
    generator = np.random.default_rng(1)
    parts = [
        generator.normal(size=(size, 5)) + 30 * (place + 1) for place, size in enumerate(sizes)
    ]
    return np.concatenate(parts).astype(np.float32)


def test_clusters_are_the_clouds_and_the_largest_comes_first() -> None:
    sizes = (20, 90, 40)
    found = k_means(clouds(sizes), 3)
    assert found.sizes.tolist() == [90, 40, 20]
    np.testing.assert_array_equal(found.labels, np.repeat([2, 0, 1], sizes))
    assert (
        found.nearest_rows(clouds(sizes), cluster=0, count=3).tolist()
        == sorted(
            range(20, 110), key=lambda row: np.square(clouds(sizes)[row] - found.centres[0]).sum()
        )[:3]
    )


def test_clustering_twice_gives_the_same_labels() -> None:
    rows = np.random.default_rng(0).normal(size=(500, 8)).astype(np.float32)
    np.testing.assert_array_equal(k_means(rows, 6).labels, k_means(rows, 6).labels)


@pytest.mark.parametrize(
    ("rows", "clusters"), [(np.zeros((0, 4)), 0), (np.zeros((9, 4)), 1), (np.eye(3), 3)]
)
def test_no_cluster_is_empty(rows: npt.NDArray[np.float64], clusters: int) -> None:
    found = k_means(rows.astype(np.float32), 5)
    assert len(found.sizes) == len(found.centres) == clusters
    assert (found.sizes > 0).all()
    assert len(found.labels) == len(rows)


def lightness(colours: npt.NDArray[np.uint8]) -> npt.NDArray[np.float64]:
    light: npt.NDArray[np.float64] = colours @ np.array([0.2126, 0.7152, 0.0722])
    return light


def test_the_first_component_is_what_a_black_and_white_print_keeps() -> None:
    ramp = np.full((50, 3), 0.5, np.float32)
    ramp[:, 0] = np.linspace(0, 1, 50)
    assert (np.diff(lightness(component_colours(ramp))) > 0).all()


def test_the_second_component_runs_along_blue_and_yellow() -> None:
    ends = component_colours(np.array([[0.5, 0, 0.5], [0.5, 1, 0.5]], np.float32)).astype(int)
    blue, yellow = ends
    assert blue[2] > blue[0] + 60
    assert yellow[0] > yellow[2] + 60


def test_no_colour_of_the_map_is_white() -> None:
    corners = np.array(np.meshgrid([0, 1], [0, 1], [0, 1])).reshape(3, -1).T
    assert component_colours(corners.astype(np.float32)).min(axis=1).max() < 245


def test_cluster_colours_are_distinct() -> None:
    colours = np.array([hex_to_rgb(colour) for colour in CLUSTER_COLOURS])
    away = np.abs(colours[:, None] - colours[None]).sum(axis=2)
    assert away[np.triu_indices(len(colours), 1)].min() > 40


@pytest.mark.parametrize("stride", [224.0, 223.5, 112.25])
def test_rounded_corners_fall_into_their_own_cells(stride: float) -> None:
    columns, rows = (part.ravel() for part in np.meshgrid(np.arange(4, 90), np.arange(7, 50)))
    coords = np.stack([np.rint(columns * stride), np.rint(rows * stride)], axis=1).astype(np.int64)
    lattice = Lattice.of(coords, tile_level0=(stride, stride), stride_level0=(stride, stride))
    np.testing.assert_array_equal(lattice.columns, columns - 4)
    np.testing.assert_array_equal(lattice.rows, rows - 7)
    assert lattice.shape == (43, 86)
    assert lattice.extent == pytest.approx((4 * stride, 7 * stride, 90 * stride, 50 * stride))


def test_cells_of_overlapping_tiles_are_centred_on_the_tiles() -> None:
    coords = np.array([[0, 0], [112, 0]])
    lattice = Lattice.of(coords, tile_level0=(224, 224), stride_level0=(112, 112))
    assert lattice.extent == (56, 56, 56 + 224, 56 + 112)


def test_places_without_a_tile_are_transparent() -> None:
    coords = np.array([[0, 0], [20, 10]])
    lattice = Lattice.of(coords, tile_level0=(10, 10), stride_level0=(10, 10))
    raster = lattice.paint(np.array([[1, 2, 3], [4, 5, 6]], np.uint8))
    assert raster[..., 3].tolist() == [[255, 0, 0], [0, 0, 255]]
    assert raster[1, 2, :3].tolist() == [4, 5, 6]
    assert np.isnan(lattice.spread(np.array([1, 2], np.float32))).tolist() == [
        [False, True, True],
        [True, True, False],
    ]
