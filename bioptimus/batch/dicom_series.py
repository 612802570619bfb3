"""DICOM slides: which files of a folder belong to one series, and which are no slides."""

import os
import struct
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import NamedTuple

DICOM_EXTENSIONS = (".dcm", ".dicom")


def may_be_dicom(name: str) -> bool:
    """Whether a file of this name is worth looking into."""
    # Archives export names such as 1.2.840.113 or IM0001: no extension, or one of digits.
    extension = PurePath(name).suffix.lower()
    return extension in DICOM_EXTENSIONS or not extension.strip(".0123456789")


_SLIDE_MODALITY = "SM"


class _DicomHeader(NamedTuple):
    modality: str
    series_uid: str


class DicomFolder:
    """The DICOM files of one folder, grouped to series, from their first few kilobytes."""

    def __init__(self, headers: Mapping[Path, _DicomHeader | None]) -> None:
        self._headers = headers
        self._series: dict[str, list[Path]] = {}
        for path, header in sorted(headers.items()):
            if header and header.series_uid and header.modality in ("", _SLIDE_MODALITY):
                self._series.setdefault(header.series_uid, []).append(path)

    @classmethod
    def read(cls, folder: Path) -> "DicomFolder":
        """Look into the files of a folder; one that cannot be listed has none."""
        try:
            with os.scandir(folder) as entries:
                names = [e.name for e in entries if may_be_dicom(e.name) and e.is_file()]
        except OSError:
            names = []
        shown = (folder / name for name in names if not name.startswith("."))
        return cls({path: _dicom_header(path) for path in shown})

    def series_of(self, path: Path) -> tuple[Path, ...]:
        """Return every file of the series in order of name; empty if it is in none."""
        header = self._headers.get(path)
        return tuple(self._series.get(header.series_uid, ())) if header else ()

    def is_only(self, path: Path) -> bool:
        """Whether a file's series has the folder to itself, but for slides that are no DICOM."""
        return path in self.series_of(path) and len(self._series) == 1

    def not_a_slide(self, path: Path) -> str | None:
        """Say why a file met in a folder is no slide; None if it is one, or a damaged one."""
        header = self._headers.get(path)
        if header is None:
            # A broken .dcm is a slide that fails, not a file to pass over.
            return None if path.suffix.lower() in DICOM_EXTENSIONS else "unknown extension"
        if header.modality not in ("", _SLIDE_MODALITY):
            return f"DICOM of modality {header.modality}, not {_SLIDE_MODALITY} (slide microscopy)"
        return None


# Tags as one number, group in the upper half.
_TRANSFER_SYNTAX = 0x0002_0010
_MODALITY = 0x0008_0060
_SERIES_UID = 0x0020_000E
_ITEM, _ITEM_END, _SEQUENCE_END = 0xFFFE_E000, 0xFFFE_E00D, 0xFFFE_E0DD
_UNDEFINED_LENGTH = 0xFFFF_FFFF
_IMPLICIT_LITTLE = "1.2.840.10008.1.2"
_UNREADABLE_HERE = ("1.2.840.10008.1.2.2", "1.2.840.10008.1.2.1.99")  # big-endian, deflated
_LONG_FORMS = {b"OB", b"OD", b"OF", b"OL", b"OV", b"OW", b"SQ", b"SV", b"UC", b"UN", b"UR", b"UT"}
_LONG_FORMS |= {b"UV"}
# The series is named before any pixel; icons and long sequences before it still fit the last.
_HEADER_READS_BYTES = (16 << 10, 1 << 20, 16 << 20)


def _dicom_header(path: Path) -> _DicomHeader | None:
    """Read modality and series of a DICOM file; None if it is none, or damaged."""
    try:
        with path.open("rb") as stream:
            data = b""
            for wanted in _HEADER_READS_BYTES:
                data += stream.read(wanted - len(data))
                if data[128:132] != b"DICM":
                    return None
                try:
                    return _parse_dicom(data)
                except RecursionError:
                    return None  # no scanner nests so deep
                except struct.error:  # ran off the end of what was read
                    if len(data) < wanted:
                        return None
    except OSError:
        return None
    return None


def _parse_dicom(data: bytes) -> _DicomHeader | None:
    values: dict[int, str] = {}
    offset, implicit = 132, False
    while True:
        tag, value, after = _element(data, offset, implicit=implicit and not _in_meta(data, offset))
        if tag > _SERIES_UID:
            return _DicomHeader(values.get(_MODALITY, ""), "")
        if tag in (_TRANSFER_SYNTAX, _MODALITY, _SERIES_UID):
            values[tag] = data[value:after].decode("ascii", "replace").strip(" \0")
        if tag == _TRANSFER_SYNTAX:
            if values[tag] in _UNREADABLE_HERE:
                return None
            implicit = values[tag] == _IMPLICIT_LITTLE
        if tag == _SERIES_UID:
            return _DicomHeader(values.get(_MODALITY, ""), values[tag])
        offset = after


def _in_meta(data: bytes, offset: int) -> bool:
    # The file's own group is explicit, whatever the rest is.
    return data[offset : offset + 2] == b"\x02\x00"


def _element(data: bytes, offset: int, *, implicit: bool) -> tuple[int, int, int]:
    """Return an element's tag, where its value starts, and where the next element does."""
    group, number = struct.unpack_from("<HH", data, offset)
    tag = group << 16 | number
    kind = data[offset + 4 : offset + 6]
    if implicit or group == 0xFFFE:
        (length,), value = struct.unpack_from("<I", data, offset + 4), offset + 8
    elif kind in _LONG_FORMS:
        (length,), value = struct.unpack_from("<I", data, offset + 8), offset + 12
    else:
        (length,), value = struct.unpack_from("<H", data, offset + 6), offset + 8
    if length == _UNDEFINED_LENGTH:
        # Sequences nested in a sequence of unknown kind are written implicitly.
        return tag, value, _skip_items(data, value, implicit=implicit or kind == b"UN")
    if value + length > len(data):
        raise struct.error("element longer than what was read")
    return tag, value, value + length


def _skip_items(data: bytes, offset: int, *, implicit: bool) -> int:
    """Return where a sequence, or an item of it, of undefined length ends."""
    while True:
        tag, _, offset = _element(data, offset, implicit=implicit)
        if tag in (_ITEM_END, _SEQUENCE_END):
            return offset
