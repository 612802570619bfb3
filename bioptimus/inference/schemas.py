"""What goes to a model and what comes back: one tile, its place, and the values for it.

Both sides exist in two forms that say the same: typed objects, which hold arrays and cost next to
nothing, and JSON text, which any program can send. ``x`` and ``y`` are level-0 pixels, counted
from the slide's corner, in everything this package sends; other senders may count in pixels of
their extraction resolution, and the numbers are only echoed.
"""

import json
import math
import operator
from collections.abc import Sequence
from typing import Any, Self, SupportsIndex

import numpy as np
import numpy.typing as npt
import orjson
import pybase64

from bioptimus.errors import RequestError
from bioptimus.inference import png

_INT64_MAX = 2**63 - 1
# Ratios are often means of float32 weights; a sum of those may exceed 1 in the last digits.
_RATIO_SLACK = 1e-6


class ModelRequest:
    """One tile for a model.

    Made from an encoded image (``ModelRequest(image_data=...)``, or :meth:`from_json`) or from
    pixels in memory (:meth:`from_pixels`), which are encoded only if ``image_data`` or JSON is
    asked for.

    Args:
        image_data: The tile as a PNG, base64.
        slide_name: Name of the slide's file, for messages and to find the answer's place.
        x: Left edge of the tile.
        y: Upper edge of the tile.
        width: Width of the image in pixels, if known.
        height: Height of the image in pixels, if known.
        tissue_ratio: Share of the tile under the tissue mask, 0..1.
        patch_idx: Number of the tile in its slide.
        resolution: Scale of the image, µm per pixel.
        bulk_rna: TPM in the model's gene order. A read-only float32 array is kept as it is, and
            the models transform it once for all requests that share it.

    Raises:
        RequestError: A value is of the wrong type or out of range; the message names the field.
    """

    __slots__ = (
        "_image_data",
        "_pixels",
        "bulk_rna",
        "height",
        "patch_idx",
        "resolution",
        "slide_name",
        "tissue_ratio",
        "width",
        "x",
        "y",
    )

    def __init__(
        self,
        *,
        image_data: str | None = None,
        slide_name: str = "",
        x: int = 0,
        y: int = 0,
        width: int | None = None,
        height: int | None = None,
        tissue_ratio: float | None = None,
        patch_idx: int = 0,
        resolution: float | None = None,
        bulk_rna: Sequence[float] | npt.NDArray[np.float32] | None = None,
    ) -> None:
        if image_data is not None and type(image_data) is not str:
            raise RequestError(f"image_data: must be a base64 string, not {_kind(image_data)}")
        if type(slide_name) is not str:
            raise RequestError(f"slide_name: must be a string, not {_kind(slide_name)}")
        self._image_data = image_data
        self._pixels: npt.NDArray[np.uint8] | None = None
        self.slide_name = slide_name
        self.x = _integer("x", x)
        self.y = _integer("y", y)
        self.width = None if width is None else _size("width", width)
        self.height = None if height is None else _size("height", height)
        self.tissue_ratio = None if tissue_ratio is None else _ratio(tissue_ratio)
        self.patch_idx = _integer("patch_idx", patch_idx)
        self.resolution = None if resolution is None else _resolution(resolution)
        self.bulk_rna = None if bulk_rna is None else _bulk_rna(bulk_rna)

    @classmethod
    def from_pixels(
        cls,
        pixels: npt.NDArray[np.uint8],
        *,
        slide_name: str = "",
        x: int = 0,
        y: int = 0,
        tissue_ratio: float | None = None,
        patch_idx: int = 0,
        resolution: float | None = None,
        bulk_rna: Sequence[float] | npt.NDArray[np.float32] | None = None,
    ) -> Self:
        """Make a request from a tile in memory; nothing is copied or encoded.

        Args:
            pixels: (H, W, 3) uint8, RGB. Must not change until the answer is there.
            slide_name: See the class.
            x: See the class.
            y: See the class.
            tissue_ratio: See the class.
            patch_idx: See the class.
            resolution: See the class.
            bulk_rna: See the class.

        Raises:
            RequestError: The array is of another type or shape, or a value is malformed.
        """
        if (
            not isinstance(pixels, np.ndarray)
            or pixels.dtype != np.uint8
            or pixels.ndim != 3
            or pixels.shape[2] != 3
            or pixels.size == 0
        ):
            found = f"{getattr(pixels, 'dtype', _kind(pixels))} {getattr(pixels, 'shape', '')}"
            raise RequestError(f"pixels: must be a uint8 array (H, W, 3), not {found}")
        request = cls(
            slide_name=slide_name,
            x=x,
            y=y,
            width=pixels.shape[1],
            height=pixels.shape[0],
            tissue_ratio=tissue_ratio,
            patch_idx=patch_idx,
            resolution=resolution,
            bulk_rna=bulk_rna,
        )
        request._pixels = pixels
        return request

    @property
    def image_data(self) -> str | None:
        """The tile as a base64 PNG; encoded on first use where the request holds pixels."""
        if self._image_data is None and self._pixels is not None:
            self._image_data = pybase64.b64encode(png.encode_stored(self._pixels)).decode("ascii")
        return self._image_data

    @property
    def holds_pixels(self) -> bool:
        """Whether :meth:`pixels` has nothing to decode."""
        return self._pixels is not None

    def pixels(self, *, size: tuple[int, int] | None = None) -> npt.NDArray[np.uint8]:
        """The tile's pixels, decoded if the request holds an encoded image.

        Args:
            size: (width, height) that the image must have. Another one is refused from the
                image's header, before anything is decompressed.

        Returns:
            (H, W, 3) uint8, RGB: the very array given to :meth:`from_pixels`, or a new one.

        Raises:
            RequestError: No image, not base64, not a PNG, of an unusable kind, corrupt, or of
                another size.
        """
        if self._pixels is not None:
            height, width = self._pixels.shape[:2]
            _check_size((width, height), size)
            return self._pixels
        if self._image_data is None:
            raise RequestError("image_data: missing")
        try:
            data = pybase64.b64decode(self._image_data, validate=True)
        except ValueError as exc:
            raise RequestError(f"image_data: not base64 ({exc})") from exc
        header = png.read_header(data)
        _check_size((header.width, header.height), size)
        return png.decode(data)

    def to_json(self) -> str:
        """The request as a JSON object, image included."""
        return _dumps(
            {
                "image_data": self.image_data,
                "bulk_rna": self.bulk_rna,
                **_place(self),
            }
        )

    @classmethod
    def from_json(cls, body: str | bytes) -> Self:
        """Read a request.

        ``image_data`` must be there; other fields have the constructor's defaults, and fields
        that are not known are ignored. The image itself is decoded by :meth:`pixels`.

        Raises:
            RequestError: Not a JSON object, or a field is malformed; the message names it.
        """
        values = _loads(body)
        known = {key: values[key] for key in _REQUEST_FIELDS if key in values}
        for key in ("image_data", "slide_name", "x", "y", "patch_idx"):
            if key in known and known[key] is None:
                raise RequestError(f"{key}: must not be null")
        if "image_data" not in known:
            raise RequestError("image_data: missing")
        return cls(**known)

    def __repr__(self) -> str:
        """Where the tile lies, without its pixels."""
        return f"ModelRequest(slide_name={self.slide_name!r}, x={self.x}, y={self.y})"


class ModelResponse:
    """What a model says of one tile.

    Args:
        output: float32: the prediction (K,), the embedding (D,) in embedding mode, or a mask
            (H, W).
        embedding: float32 (D,), in ``prediction_with_embedding`` mode only.
        slide_name: Echo of the request, like all that follow.
        x: Echo.
        y: Echo.
        width: Echo.
        height: Echo.
        tissue_ratio: Echo.
        patch_idx: Echo.
        resolution: Echo.

    Attributes:
        finite: Whether every value is a number. A model may answer NaN or infinity for one tile
            of a batch; that is no failure of the batch, so whoever stores the values looks here.
            JSON knows neither: they are ``null`` there and read back as NaN.
    """

    __slots__ = (
        "embedding",
        "finite",
        "height",
        "output",
        "patch_idx",
        "resolution",
        "slide_name",
        "tissue_ratio",
        "width",
        "x",
        "y",
    )

    def __init__(
        self,
        *,
        output: npt.NDArray[np.float32],
        embedding: npt.NDArray[np.float32] | None = None,
        slide_name: str = "",
        x: int = 0,
        y: int = 0,
        width: int | None = None,
        height: int | None = None,
        tissue_ratio: float | None = None,
        patch_idx: int = 0,
        resolution: float | None = None,
    ) -> None:
        self.output = output
        self.embedding = embedding
        self.finite = bool(
            np.isfinite(output).all() and (embedding is None or np.isfinite(embedding).all())
        )
        self.slide_name = slide_name
        self.x = x
        self.y = y
        self.width = width
        self.height = height
        self.tissue_ratio = tissue_ratio
        self.patch_idx = patch_idx
        self.resolution = resolution

    @classmethod
    def answering(
        cls,
        request: ModelRequest,
        output: npt.NDArray[np.float32],
        embedding: npt.NDArray[np.float32] | None,
        *,
        finite: bool,
    ) -> Self:
        """Make the response to a request.

        Args:
            request: Whose metadata are echoed.
            output: See the class.
            embedding: See the class.
            finite: As found for the whole batch in one go, which costs less than tile by tile.
        """
        response = cls.__new__(cls)
        response.output = output
        response.embedding = embedding
        response.finite = finite
        response.slide_name = request.slide_name
        response.x = request.x
        response.y = request.y
        response.width = request.width
        response.height = request.height
        response.tissue_ratio = request.tissue_ratio
        response.patch_idx = request.patch_idx
        response.resolution = request.resolution
        return response

    def to_json(self) -> str:
        """The response as a JSON object; ``embedding`` only where there is one."""
        values: dict[str, Any] = {"output": self.output, **_place(self)}
        if self.embedding is not None:
            values["embedding"] = self.embedding
        return _dumps(values)

    @classmethod
    def from_json(cls, body: str | bytes) -> Self:
        """Read a response; the float32 values come back exactly as they were.

        Raises:
            RequestError: Not a JSON object, ``output`` is missing, or a value is malformed.
        """
        values = _loads(body)
        if values.get("output") is None:
            raise RequestError("output: missing")
        embedding = values.get("embedding")
        place = ModelRequest(**{key: values[key] for key in _PLACE_FIELDS if key in values})
        return cls(
            output=_values("output", values["output"]),
            embedding=None if embedding is None else _values("embedding", embedding),
            **_place(place),
        )

    def __repr__(self) -> str:
        """Where the tile lies and the shape of what was found."""
        return (
            f"ModelResponse(slide_name={self.slide_name!r}, x={self.x}, y={self.y}, "
            f"output={self.output.shape})"
        )


_PLACE_FIELDS = (
    "slide_name",
    "x",
    "y",
    "width",
    "height",
    "tissue_ratio",
    "patch_idx",
    "resolution",
)
_REQUEST_FIELDS = ("image_data", "bulk_rna", *_PLACE_FIELDS)


def _place(value: ModelRequest | ModelResponse) -> dict[str, Any]:
    return {key: getattr(value, key) for key in _PLACE_FIELDS}


def _check_size(found: tuple[int, int], wanted: tuple[int, int] | None) -> None:
    if wanted is not None and found != wanted:
        raise RequestError(
            f"image_data: tile of {found[0]} x {found[1]} px, "
            f"the model takes {wanted[0]} x {wanted[1]} px"
        )


def _dumps(values: dict[str, Any]) -> str:
    for key, value in values.items():
        if isinstance(value, np.ndarray):
            values[key] = np.ascontiguousarray(value)
    return orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY).decode("utf-8")


def _loads(body: str | bytes) -> dict[str, Any]:
    if not isinstance(body, str | bytes | bytearray):
        raise RequestError(f"body: must be a JSON string, not {_kind(body)}")
    try:
        values = orjson.loads(body)
    except orjson.JSONDecodeError as exc:
        # orjson refuses NaN and Infinity without naming the field; Python's own parser reads
        # them, and the field's check then names it.
        try:
            values = json.loads(body)
        except (ValueError, RecursionError):
            raise RequestError(f"body: not JSON ({exc})") from exc
    if not isinstance(values, dict):
        raise RequestError(f"body: must be a JSON object, not {_kind(values)}")
    return values


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__


def _integer(name: str, value: SupportsIndex | float) -> int:
    if type(value) is int:
        number = value
    elif isinstance(value, float) and value.is_integer():
        number = int(value)  # JavaScript and R write whole numbers as 12.0
    elif isinstance(value, bool | float | str) or value is None:
        raise RequestError(f"{name}: must be a whole number, not {value!r}")
    else:
        try:
            number = operator.index(value)
        except TypeError:
            raise RequestError(f"{name}: must be a whole number, not {_kind(value)}") from None
    if not -_INT64_MAX <= number <= _INT64_MAX:
        raise RequestError(f"{name}: out of range")
    return number


def _size(name: str, value: SupportsIndex | float) -> int:
    number = _integer(name, value)
    if number < 1:
        raise RequestError(f"{name}: must be at least 1 px, not {number}")
    return number


def _float(name: str, value: Any) -> float:
    if isinstance(value, bool | str):
        raise RequestError(f"{name}: must be a number, not {value!r}")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise RequestError(f"{name}: must be a number, not {_kind(value)}") from None
    if not math.isfinite(number):
        raise RequestError(f"{name}: must be finite, not {number}")
    return number


def _ratio(value: Any) -> float:
    number = _float("tissue_ratio", value)
    if not -_RATIO_SLACK <= number <= 1 + _RATIO_SLACK:
        raise RequestError(f"tissue_ratio: must be from 0 to 1, not {number:g}")
    return number


def _resolution(value: Any) -> float:
    number = _float("resolution", value)
    if number <= 0:
        raise RequestError(f"resolution: must be positive µm per pixel, not {number:g}")
    return number


def _bulk_rna(values: Any) -> npt.NDArray[np.float32]:
    name = "bulk_rna"
    if isinstance(values, np.ndarray) and values.dtype == np.float32 and values.ndim == 1:
        if not np.isfinite(values).all():
            raise RequestError(f"{name}: holds NaN or infinity")
        return values
    array = _values(name, values)
    # numpy reads true among numbers as 1.
    if not isinstance(values, np.ndarray) and bool in set(map(type, values)):
        raise RequestError(f"{name}: must be a list of numbers, without true or false")
    if array.ndim != 1:
        raise RequestError(f"{name}: must be a flat list of numbers")
    if not np.isfinite(array).all():
        raise RequestError(f"{name}: holds null, NaN or infinity")
    return array


def _values(name: str, values: Any) -> npt.NDArray[np.float32]:
    """A list of numbers, or of such lists, as float32; null is NaN."""
    if not isinstance(values, Sequence | np.ndarray) or isinstance(values, str | bytes):
        raise RequestError(f"{name}: must be a list of numbers, not {_kind(values)}")
    try:
        array = np.asarray(values)
        if array.dtype == object and _leaf_types(values) <= {int, float, type(None)}:
            array = np.asarray(values, dtype=np.float64)
    except (ValueError, TypeError, OverflowError) as exc:
        raise RequestError(f"{name}: must be a list of numbers ({exc})") from exc
    if array.dtype.kind not in "fiu" and array.size:
        raise RequestError(f"{name}: must be a list of numbers")
    with np.errstate(over="ignore"):  # what overflows float32 becomes infinity
        return array.astype(np.float32)


def _leaf_types(values: Any) -> set[type]:
    """Types in a list, or in a list of lists."""
    types = set(map(type, values))
    if list in types:
        types.discard(list)
        for row in values:
            if type(row) is list:
                types.update(map(type, row))
    return types
