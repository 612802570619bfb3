"""PNG in memory: stored (uncompressed) going out, any 8-bit colour PNG coming in.

A stored PNG is a valid, lossless PNG whose pixels are not compressed. Between two processes of one
machine compression only costs time: Pillow's default takes 60 times as long to write.
"""

import struct
import zlib
from dataclasses import dataclass
from io import BytesIO

import numpy as np
import numpy.typing as npt

from bioptimus.errors import RequestError

SIGNATURE = b"\x89PNG\r\n\x1a\n"

# No tile comes near 8192 x 8192 px; a header that claims more is refused before any memory is
# taken for it.
MAX_PIXELS = 1 << 26

_IHDR = struct.Struct(">IIBBBBB")
_COLOUR_TYPES = {0: "greyscale", 2: "RGB", 3: "palette", 4: "greyscale with alpha", 6: "RGBA"}
_FOREIGN = {
    b"\xff\xd8\xff": "a JPEG",
    b"GIF8": "a GIF",
    b"RIFF": "a WebP",
    b"II*\x00": "a TIFF",
    b"MM\x00*": "a TIFF",
    b"BM": "a BMP",
}


@dataclass(frozen=True, slots=True)
class PNGHeader:
    """What the first chunk says.

    Attributes:
        width: Pixels to the right.
        height: Pixels downwards.
        bit_depth: Bits of a sample.
        colour_type: 2 RGB, 3 palette, 6 RGBA, as the format numbers them.
        interlaced: Whether the rows come in seven passes.
    """

    width: int
    height: int
    bit_depth: int
    colour_type: int
    interlaced: bool


def encode_stored(pixels: npt.NDArray[np.uint8]) -> bytes:
    """Write an RGB image as an uncompressed PNG.

    Args:
        pixels: (H, W, 3) uint8.

    Returns:
        A whole PNG file; :func:`decode` gives the same pixels back.
    """
    height, width, channels = pixels.shape
    rows = np.zeros((height, 1 + width * channels), np.uint8)  # column 0: filter "none"
    rows[:, 1:].reshape(height, width, channels)[...] = pixels
    header = _IHDR.pack(width, height, 8, 2, 0, 0, 0)
    return b"".join(
        (
            SIGNATURE,
            *_chunk(b"IHDR", header),
            *_chunk(b"IDAT", zlib.compress(rows.data, level=0)),
            *_chunk(b"IEND", b""),
        )
    )


def _chunk(kind: bytes, body: bytes) -> tuple[bytes, ...]:
    checksum = zlib.crc32(body, zlib.crc32(kind))
    return struct.pack(">I", len(body)), kind, body, struct.pack(">I", checksum)


def read_header(data: bytes) -> PNGHeader:
    """Read size and kind, decompressing nothing.

    Raises:
        RequestError: Not a PNG, a broken header, or an image of more than ``MAX_PIXELS``.
    """
    if data[:8] != SIGNATURE:
        found = next((name for magic, name in _FOREIGN.items() if data.startswith(magic)), None)
        raise RequestError(f"image_data: not a PNG{f' but {found}' if found else ''}; send a PNG")
    if len(data) < 33 or data[8:16] != b"\x00\x00\x00\rIHDR":
        raise RequestError("image_data: PNG without a header; it may be truncated")
    if zlib.crc32(data[12:29]) != int.from_bytes(data[29:33], "big"):
        raise RequestError("image_data: PNG header is corrupt (checksum differs)")
    width, height, depth, colour, _, _, interlace = _IHDR.unpack(data[16:29])
    if min(width, height) < 1:
        raise RequestError(f"image_data: PNG of {width} x {height} px has no pixels")
    if width * height > MAX_PIXELS:
        raise RequestError(
            f"image_data: PNG of {width} x {height} px; at most {MAX_PIXELS} pixels are decoded"
        )
    return PNGHeader(width, height, depth, colour, bool(interlace))


def decode(data: bytes) -> npt.NDArray[np.uint8]:
    """Read an 8-bit colour PNG.

    Taken: RGB, palettes, and RGBA whose pixels are all opaque. Refused, because the model would
    see something else than the sender did: greyscale, 16 bits, transparency.

    Returns:
        Writable, contiguous (H, W, 3) uint8, RGB.

    Raises:
        RequestError: Not a PNG, of a refused kind, corrupt, or too large.
    """
    header = read_header(data)
    _refuse_unusable(header)
    stored = _decode_stored(data, header)
    return stored if stored is not None else _decode_any(data, header)


def _refuse_unusable(header: PNGHeader) -> None:
    kind = _COLOUR_TYPES.get(header.colour_type, f"colour type {header.colour_type}")
    if header.bit_depth == 16:
        raise RequestError(f"image_data: 16-bit {kind} PNG; send 8-bit RGB")
    if header.colour_type not in (2, 3, 6):
        raise RequestError(f"image_data: {kind} PNG; send 8-bit RGB")


def _decode_stored(data: bytes, header: PNGHeader) -> npt.NDArray[np.uint8] | None:
    """The pixels if the file is laid out as :func:`encode_stored` does it, else None."""
    length = int.from_bytes(data[33:37], "big")
    end = 41 + length
    plain = (
        (header.bit_depth, header.colour_type, header.interlaced) == (8, 2, False)
        and data[37:41] == b"IDAT"
        and data[end + 8 : end + 12] == b"IEND"
        and length > 7
        and data[43] & 0b110 == 0  # first block of the zlib stream: stored, not compressed
    )
    if not plain:
        return None
    size = header.height * (1 + 3 * header.width)
    inflate = zlib.decompressobj()
    try:
        # One byte more than is due, so that a stream that is too long shows itself.
        raw = inflate.decompress(memoryview(data)[41:end], size + 1)
    except zlib.error as exc:
        raise RequestError(f"image_data: PNG pixels are corrupt ({exc})") from exc
    if len(raw) != size or not inflate.eof:
        raise RequestError("image_data: PNG pixels are corrupt or truncated")
    rows = np.frombuffer(raw, np.uint8).reshape(header.height, 1 + 3 * header.width)
    if rows[:, 0].any():
        return None  # rows are filtered: Pillow undoes that
    # The copy drops the filter column, and makes the array writable, which torch wants.
    return rows[:, 1:].reshape(header.height, header.width, 3).copy()


def _decode_any(data: bytes, header: PNGHeader) -> npt.NDArray[np.uint8]:
    from PIL import Image

    try:
        with Image.open(BytesIO(data), formats=["PNG"]) as image:
            if "transparency" in image.info:
                raise RequestError("image_data: PNG with transparency; send opaque 8-bit RGB")
            image.load()
            pixels = np.array(image if image.mode == "RGBA" else image.convert("RGB"))
    except RequestError:
        raise
    except (OSError, SyntaxError, ValueError, EOFError, IndexError, struct.error, zlib.error) as e:
        # What Pillow raises on damaged files.
        raise RequestError(f"image_data: PNG cannot be decoded ({e})") from e
    if header.colour_type == 6:
        if (pixels[..., 3] != 255).any():
            raise RequestError(
                "image_data: PNG with transparent pixels; composite it on the slide's background"
            )
        pixels = np.ascontiguousarray(pixels[..., :3])
    return pixels
