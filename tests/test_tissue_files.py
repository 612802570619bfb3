"""Masks that users bring, and the polygons that we give."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image

from bioptimus.errors import TissueError
from bioptimus.tissue import TissueMask, load_mask, outline, polygons

DIMENSIONS = (3200, 1600)
MPP = (0.25, 0.25)
SQUARE = [[320, 160], [960, 160], [960, 800], [320, 800], [320, 160]]
HOLE = [[480, 320], [640, 320], [640, 480], [480, 480], [480, 320]]


def write(path: Path, document: object) -> Path:
    path.write_text(json.dumps(document))
    return path


def feature(kind: str, coordinates: object, **properties: object) -> dict[str, Any]:
    return {
        "type": "Feature",
        "geometry": {"type": kind, "coordinates": coordinates},
        "properties": properties,
    }


def load(path: Path) -> TissueMask:
    return load_mask(path, dimensions=DIMENSIONS, mpp=MPP)


def expected(*, hole: bool) -> npt.NDArray[np.bool_]:
    mask = np.zeros((50, 100), dtype=bool)
    mask[5:25, 10:30] = True
    if hole:
        mask[10:15, 15:20] = False
    return mask


def test_polygon_is_drawn_without_growing(tmp_path: Path) -> None:
    path = write(tmp_path / "a.geojson", {"type": "Polygon", "coordinates": [SQUARE]})
    found = load(path)
    assert (found.mask == expected(hole=False)).all()
    assert found.downsample == (32.0, 32.0)
    assert found.method == "file"


def test_polygon_that_reaches_over_the_edges_of_a_slide_with_uneven_pixels(tmp_path: Path) -> None:
    ring = [[-320, -160], [1600, -160], [1600, 800], [-320, 800]]
    path = write(tmp_path / "a.geojson", {"type": "Polygon", "coordinates": [ring]})
    found = load_mask(path, dimensions=DIMENSIONS, mpp=(0.25, 0.5))
    expected = np.zeros((100, 100), dtype=bool)
    expected[:50, :50] = True
    np.testing.assert_array_equal(found.mask, expected)
    assert found.downsample == (32.0, 16.0)


def test_hole_is_left_out_and_overlapping_polygons_are_united(tmp_path: Path) -> None:
    collection = {
        "type": "FeatureCollection",
        "features": [
            feature("Polygon", [SQUARE, HOLE]),
            feature("MultiPolygon", [[SQUARE, HOLE], [[[-50, -50], [-9, -50], [-9, -9]]]]),
        ],
    }
    assert (load(write(tmp_path / "a.json", collection)).mask == expected(hole=True)).all()


def test_pixel_is_tissue_whose_middle_lies_in_any_of_the_polygons(tmp_path: Path) -> None:
    squares = [[[x + by, y + by] for x, y in SQUARE] for by in (8, -8)]  # a quarter of a pixel
    triangle = [[0, 0], [1600, 0], [0, 160]]  # its box, not the triangle, reaches the squares
    for square in squares:
        collection = [feature("Polygon", [square]), feature("Polygon", [triangle])]
        found = load(write(tmp_path / "a.json", collection)).mask
        assert found[5:].sum() == expected(hole=False).sum()
        assert (found >= expected(hole=False)).all()


def test_list_of_features_is_read_and_ignored_classes_are_not(tmp_path: Path) -> None:
    features = [
        feature("Polygon", [SQUARE[:-1]], classification={"name": "Tissue"}),
        feature("Polygon", [[[0, 0], [3200, 0], [0, 1600]]], classification={"name": "Ignore*"}),
        feature("Point", [5, 5]),
    ]
    assert (load(write(tmp_path / "a.geojson", features)).mask == expected(hole=False)).all()


OTHER = {"names": ["Stroma", "Fibrous"], "color": [1, 2, 3]}
TRIANGLE = [[0, 0], [3200, 0], [0, 1600]]
CLASSES = [
    feature("Polygon", [SQUARE], classification={"name": "Tumor"}),
    feature("Polygon", [TRIANGLE], classification=OTHER),
    feature("Polygon", [TRIANGLE], classification={"names": ["Tumor", "Ignore*"]}),
    feature("Polygon", [TRIANGLE]),
]


@pytest.mark.parametrize("classes", [("Tumor",), ("Tumor", "Necrosis")])
def test_annotations_of_the_classes_asked_for_alone_are_tissue(
    tmp_path: Path, classes: tuple[str, ...]
) -> None:
    path = write(tmp_path / "a.geojson", CLASSES[:2] + CLASSES[3:])
    found = load_mask(path, dimensions=DIMENSIONS, mpp=MPP, classes=classes)
    assert (found.mask == expected(hole=False)).all()
    assert found.classes == ("Tumor",)


def test_a_derived_class_is_asked_for_by_the_one_it_derives_from(tmp_path: Path) -> None:
    path = write(tmp_path / "a.geojson", CLASSES)
    found = load_mask(path, dimensions=DIMENSIONS, mpp=MPP, classes=("Stroma",))
    assert found.classes == ("Stroma: Fibrous",)
    assert load(path).classes == ("Stroma: Fibrous", "Tumor")


def test_a_mask_without_the_classes_asked_for_names_those_that_are_there(tmp_path: Path) -> None:
    path = write(tmp_path / "a.geojson", CLASSES)
    wanted = (
        r"^mask a\.geojson: holds Stroma: Fibrous, Tumor, Tumor: Ignore\*, no class, but none of "
        "--tissue-class tumour"
    )
    with pytest.raises(TissueError, match=wanted):
        load_mask(path, dimensions=DIMENSIONS, mpp=MPP, classes=("tumour",))
    picture = tmp_path / "b.png"
    Image.new("L", (100, 50)).save(picture)
    with pytest.raises(TissueError, match=r"^mask b\.png: a PNG has no classes"):
        load_mask(picture, dimensions=DIMENSIONS, mpp=MPP, classes=("Tumor",))


def test_slanted_polygon_has_its_area(tmp_path: Path) -> None:
    ring = [[100.3, 90.1], [3000.7, 400.2], [1500.5, 1550.9]]
    found = load(write(tmp_path / "a.geojson", {"type": "Polygon", "coordinates": [ring]}))
    (ax, ay), (bx, by), (cx, cy) = ring
    area = abs((bx - ax) * (cy - ay) - (cx - ax) * (by - ay)) / 2
    assert found.mask.sum() * 32 * 32 == pytest.approx(area, rel=0.005)


def test_shapes_without_coordinates_are_nothing_drawn(tmp_path: Path) -> None:
    empty = [feature("Polygon", []), feature("MultiPolygon", []), feature("MultiPolygon", [[]])]
    drawn = [*empty, feature("Polygon", [SQUARE])]
    assert (load(write(tmp_path / "a.geojson", drawn)).mask == expected(hole=False)).all()
    assert load(write(tmp_path / "b.geojson", empty)).emptied_by == "mask file b.geojson"


def test_collections_within_collections_keep_the_class_of_their_feature(tmp_path: Path) -> None:
    parts = [{"type": "Polygon", "coordinates": [SQUARE, HOLE]}, {"type": "Point"}]
    several = {"type": "GeometryCollection", "geometries": [parts[0]]}
    tumor: dict[str, object] = {
        "type": "Feature",
        "geometry": {"type": "GeometryCollection", "geometries": [several, parts[1]]},
        "properties": {"classification": {"name": "Tumor"}},
    }
    bare = {"type": "Feature", "geometry": {"type": "Polygon", "coordinates": [TRIANGLE]}}
    inner = {"type": "FeatureCollection", "features": [tumor, {**bare, "properties": None}]}
    path = write(tmp_path / "a.geojson", {"type": "FeatureCollection", "features": [inner, bare]})
    found = load_mask(path, dimensions=DIMENSIONS, mpp=MPP, classes=("Tumor",))
    assert (found.mask == expected(hole=True)).all()
    assert load(path).classes == ("Tumor",)
    assert load(path).mask[:, 0].all()  # the triangle without a class


def test_collection_without_features_is_a_slide_without_tissue(tmp_path: Path) -> None:
    found = load(write(tmp_path / "a.geojson", {"type": "FeatureCollection", "features": []}))
    assert not found.mask.any()
    assert found.emptied_by == "mask file a.geojson"


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"type": "FeatureCollection", "features": [feature("Point", [1, 2])]}, "holds Point"),
        ({"type": "Topology"}, "no geometry"),
        ({"type": "Polygon", "coordinates": [[[1, 2], [3, 4]]]}, "a ring of 2 points"),
        ({"type": "Polygon", "coordinates": [[[1, "b"], [3, 4], [5, 6]]]}, "malformed"),
        (
            {"type": "Polygon", "coordinates": [[[9e5, 9e5], [9e5, 9e6], [9e6, 9e6]]]},
            "1 polygon, none",
        ),
    ],
)
def test_what_is_no_mask_is_named(tmp_path: Path, document: object, words: str) -> None:
    with pytest.raises(TissueError, match=words):
        load(write(tmp_path / "a.geojson", document))


@pytest.mark.parametrize("content", [b"", b"GIF89a", b"{", b"\x89PNG\r\n\x1a\n", b"{'type': 1}"])
def test_unreadable_mask_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "mask.png"
    path.write_bytes(content)
    with pytest.raises(TissueError, match=r"mask\.png"):
        load(path)


def test_missing_mask_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TissueError, match=r"gone\.png: cannot be read: No such file"):
        load(tmp_path / "gone.png")


@pytest.mark.parametrize("mode", ["1", "L", "P", "I;16", "RGB", "RGBA", "LA"])
def test_png_of_any_kind_is_tissue_where_it_is_not_0(tmp_path: Path, mode: str) -> None:
    mask = expected(hole=True)
    if mode in ("1", "L", "P", "I;16"):
        values = mask.astype(np.uint16 if mode == "I;16" else np.uint8)
        image = Image.fromarray(mask if mode == "1" else values)
        if mode == "P":
            image.putpalette([0, 0, 0, 255, 0, 0])
    else:
        image = Image.fromarray(mask.astype(np.uint8) * 200).convert(mode)
    image.save(tmp_path / "a.png")
    found = load(tmp_path / "a.png")
    assert (found.mask == mask).all()
    assert found.downsample == (32.0, 32.0)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L", "RGB"])
def test_png_that_is_transparent_in_parts_is_refused(tmp_path: Path, mode: str) -> None:
    """Black drawn on transparent white: everything but the drawing would be tissue."""
    drawn = expected(hole=False)
    white = Image.fromarray(np.where(drawn, 0, 255).astype(np.uint8))
    image, path = white.convert(mode), tmp_path / "a.png"
    if "A" in mode:
        image.putalpha(Image.fromarray(drawn.astype(np.uint8) * 255))
        image.save(path)
    elif mode == "P":
        Image.fromarray(drawn.astype(np.uint8)).convert("P").save(path, transparency=b"\x00\xff")
    else:
        image.save(path, transparency=255 if mode == "L" else (255, 255, 255))
    with pytest.raises(TissueError, match=r"^mask a\.png: is transparent in parts.*greyscale"):
        load(path)


def test_png_cut_short_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    noise = np.random.default_rng(0).integers(0, 255, (50, 100), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(TissueError, match=r"a\.png: PNG cannot be decoded"):
        load(path)


@pytest.mark.parametrize("size", [(50, 100), (1000, 520), (1000, 480)])
def test_png_of_another_shape_is_refused(tmp_path: Path, size: tuple[int, int]) -> None:
    Image.new("L", size).save(tmp_path / "a.png")
    with pytest.raises(TissueError, match=r"a\.png: .* does not have the shape of the slide"):
        load(tmp_path / "a.png")


@pytest.mark.parametrize("size", [(20, 11), (1000, 505), (1000, 495)])
def test_png_whose_sides_were_rounded_has_a_scale_along_each(
    tmp_path: Path, size: tuple[int, int]
) -> None:
    Image.new("L", size).save(tmp_path / "a.png")
    found = load_mask(tmp_path / "a.png", dimensions=(1000, 500), mpp=MPP)
    assert found.downsample == (1000 / size[0], 500 / size[1])


def test_png_finer_than_any_use_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    Image.new("L", (4, 4)).save(path)
    content = bytearray(path.read_bytes())
    content[16:24] = (40_000).to_bytes(4, "big") * 2
    path.write_bytes(content)
    with pytest.raises(TissueError, match="save it at about 8 µm/px"):
        load(path)


@given(arrays(np.bool_, st.tuples(st.integers(1, 12), st.integers(1, 12))))
def test_outline_filled_again_is_the_mask(values: npt.NDArray[np.bool_]) -> None:
    rings = outline(TissueMask(mask=values, downsample=(1.0, 1.0), method="file"))
    inside = np.zeros(values.shape, dtype=int)
    for ring in rings:
        for (x0, y0), (x1, y1) in zip(ring, np.roll(ring, -1, axis=0), strict=True):
            if x0 == x1:  # an upright edge flips everything right of it
                inside[int(min(y0, y1)) : int(max(y0, y1)), int(x0) :] += 1
    assert (inside % 2 == values).all()


def test_polygons_survive_geojson_and_back(tmp_path: Path) -> None:
    mask = expected(hole=True)
    mask[30:40, 60:99] = True
    mask[33, 70] = False
    found = polygons(TissueMask(mask=mask, downsample=(32.0, 32.0), method="auto"))
    assert sorted(len(rings) for rings in found) == [2, 2]
    coordinates = [[ring.tolist() for ring in rings] for rings in found]
    path = write(tmp_path / "a.geojson", {"type": "MultiPolygon", "coordinates": coordinates})
    assert (load(path).mask == mask).all()


def test_empty_mask_has_no_outline() -> None:
    assert outline(TissueMask(mask=np.zeros((3, 3), bool), downsample=(1, 1), method="auto")) == []
