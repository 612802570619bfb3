"""Which µm/px a slide has: every claim collected, one chosen, the reasons kept.

Pure functions over names and numbers; nothing here opens a file. The order is that of
:data:`ORDER`: what the user insists on, what OpenSlide says, what vendor fields and TIFF tags
say, what the user offers as a fallback, and the objective power as the last, warned-about guess.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from xml.etree import ElementTree

from bioptimus.errors import ResolutionError, UsageError

# Outside this range no light microscope of pathology writes slides; 72 dpi would be 352.8.
PLAUSIBLE_MPP = (0.05, 20.0)
# Scanners differ by a fraction of a percent between the axes; more than this is worth a warning.
ANISOTROPY_TOLERANCE = 0.02
# Two fields of one file that differ by more than this do not mean the same scale.
CONTRADICTION_TOLERANCE = 0.10
# A 40x scan has between 0.22 and 0.28 µm/px, a 20x one between 0.32 and 0.55: µm/px times power
# lies near 10 and never further off than this factor.
POWER_FACTOR_TOLERANCE = 5 / 3
# µm/px of a scan whose objective power is all that is known.
MPP_TIMES_POWER = 10.0

_UM_PER_UNIT = {
    "inch": 25400.0,
    "in": 25400.0,
    "centimeter": 10000.0,
    "centimetre": 10000.0,
    "cm": 10000.0,
    "millimeter": 1000.0,
    "millimetre": 1000.0,
    "mm": 1000.0,
    "micrometer": 1.0,
    "micrometre": 1.0,
    "micron": 1.0,
    "microns": 1.0,
    "um": 1.0,
    "µm": 1.0,  # micro sign
    "μm": 1.0,  # Greek mu
    "nm": 0.001,
    "nanometer": 0.001,
    "m": 1e6,
    "meter": 1e6,
    "å": 1e-4,
    "pm": 1e-6,
    "km": 1e9,
    "dm": 1e5,
    "thou": 25.4,
    "mil": 25.4,
    "pt": 25400.0 / 72,
    "ft": 304800.0,
    "yd": 914400.0,
    "li": 25400.0 / 12,
}
# TIFF 6.0 knows the first three; the last two are in use all the same.
_TIFF_UNITS = {"1": "none", "2": "inch", "3": "centimeter", "4": "millimeter", "5": "micrometer"}


# What the user said, and by what.
OVERRIDE = "--mpp-override"
MPP_COLUMN = "the list's mpp column"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One claim about the slide's scale.

    Attributes:
        source: Where the claim stands, e.g. ``aperio.MPP``.
        mpp: (x, y) µm per level-0 pixel.
        verdict: Why it was taken or passed over; empty until :func:`decide` has run.
        used: Whether it won.
        is_override: Whether the user said so, against whatever the file says.
    """

    source: str
    mpp: tuple[float, float]
    verdict: str = ""
    used: bool = False
    is_override: bool = False

    @property
    def is_plausible(self) -> bool:
        """Whether both values lie in :data:`PLAUSIBLE_MPP`."""
        return all(is_plausible(value) for value in self.mpp)


@dataclass(frozen=True, kw_only=True)
class Resolution:
    """The scale of a slide, or the reason that it has none.

    Attributes:
        source: Where the winning value stands; ``none`` if there is no winner.
        candidates: Every claim, in the order of precedence.
        warnings: What a user should know, one sentence each.
        value: (x, y) µm per level-0 pixel, None without a winner.
        problem: Message of the error that :attr:`mpp` raises; empty with a winner.
    """

    source: str = "none"
    candidates: tuple[Candidate, ...] = ()
    warnings: tuple[str, ...] = ()
    value: tuple[float, float] | None = None
    problem: str = ""

    @property
    def mpp(self) -> tuple[float, float]:
        """(x, y) µm per level-0 pixel.

        Raises:
            ResolutionError: No plausible claim was found.
        """
        if self.value is None:
            raise ResolutionError(self.problem)
        return self.value


@dataclass(frozen=True, kw_only=True)
class Claims:
    """Everything a file says about its scale.

    Attributes:
        openslide: OpenSlide's own (x, y) µm/px.
        fields: Claims of vendor fields and TIFF tags, best first.
        objective_power: The scanner's nominal lens.
        notes: What was found and could not be used, e.g. a resolution without a unit.
    """

    openslide: tuple[float, float] | None = None
    fields: tuple[Candidate, ...] = ()
    objective_power: float | None = None
    notes: tuple[str, ...] = field(default=())


def is_plausible(mpp: float) -> bool:
    """Whether a slide can have this many µm per pixel."""
    return PLAUSIBLE_MPP[0] <= mpp <= PLAUSIBLE_MPP[1]


def check_mpp_option(value: float | None, *, flag: str) -> None:
    """Refuse an override or fallback that no slide can have.

    Raises:
        UsageError: The value is not finite or not plausible.
    """
    if value is not None and not (math.isfinite(value) and is_plausible(value)):
        raise UsageError(
            f"{flag} {value:g}: must lie between {PLAUSIBLE_MPP[0]:g} and "
            f"{PLAUSIBLE_MPP[1]:g} µm per pixel"
        )


def decide(
    name: str,
    claims: Claims,
    *,
    mpp_override: float | None = None,
    override_source: str = OVERRIDE,
    mpp_fallback: float | None = None,
) -> Resolution:
    """Choose the slide's µm/px.

    Args:
        name: The slide's file name, for messages.
        claims: What the file says.
        mpp_override: Wins over everything.
        override_source: What the user said it by.
        mpp_fallback: Used when the file says nothing plausible.

    Returns:
        The resolution; without a plausible claim, one whose ``mpp`` raises.

    Raises:
        UsageError: Override or fallback are not plausible.
    """
    check_mpp_option(mpp_override, flag=override_source)
    check_mpp_option(mpp_fallback, flag="--mpp-fallback")
    ordered = _in_order(claims, mpp_fallback=mpp_fallback)
    if mpp_override is not None:
        mpp = (mpp_override, mpp_override)
        ordered.insert(0, Candidate(source=override_source, mpp=mpp, is_override=True))
    winner = next((entry for entry in ordered if entry.is_plausible), None)
    judged = tuple(_with_verdict(entry, winner) for entry in ordered)
    if winner is None:
        return Resolution(candidates=judged, problem=_problem(name, judged, claims.notes))
    return Resolution(
        source=winner.source,
        candidates=judged,
        value=winner.mpp,
        warnings=tuple(_warnings(name, winner, judged, claims.objective_power)),
    )


def _in_order(claims: Claims, *, mpp_fallback: float | None) -> list[Candidate]:
    ordered = []
    if claims.openslide is not None:
        ordered.append(Candidate(source=OPENSLIDE, mpp=claims.openslide))
    ordered.extend(claims.fields)
    if mpp_fallback is not None:
        ordered.append(Candidate(source=FALLBACK, mpp=(mpp_fallback, mpp_fallback)))
    if claims.objective_power is not None:
        guess = MPP_TIMES_POWER / claims.objective_power
        ordered.append(Candidate(source=OBJECTIVE, mpp=(guess, guess)))
    return ordered


OPENSLIDE = "openslide.mpp-x/y"
FALLBACK = "--mpp-fallback"
OBJECTIVE = "objective power"
ORDER = (OVERRIDE, OPENSLIDE, "vendor fields and TIFF tags", FALLBACK, OBJECTIVE)


def _with_verdict(entry: Candidate, winner: Candidate | None) -> Candidate:
    if not entry.is_plausible:
        return replace(
            entry,
            verdict=f"implausible: not within {PLAUSIBLE_MPP[0]:g} to {PLAUSIBLE_MPP[1]:g} µm/px",
        )
    if entry is winner:
        return replace(entry, verdict="used: first plausible value", used=True)
    assert winner is not None
    return replace(entry, verdict=f"passed over: {winner.source} comes first")


def _problem(name: str, judged: Sequence[Candidate], notes: Sequence[str]) -> str:
    advice = "pass --mpp-override (or an mpp column) with the scanner's µm/px"
    if judged:
        claim = judged[0]
        return (
            f"{name}: mpp {mpp_text(claim.mpp)} from {claim.source} is implausible "
            f"(expected {PLAUSIBLE_MPP[0]:g} to {PLAUSIBLE_MPP[1]:g} µm/px); {advice}"
        )
    found = f" ({'; '.join(notes)})" if notes else ""
    return f"{name}: no mpp in its metadata{found}; {advice}"


def _warnings(
    name: str, winner: Candidate, judged: Sequence[Candidate], power: float | None
) -> Iterable[str]:
    x, y = winner.mpp
    if relative_difference(x, y) > ANISOTROPY_TOLERANCE:
        yield (
            f"{name}: mpp differs between the axes, {mpp_text(winner.mpp)} from {winner.source}; "
            "each axis is scaled by its own factor"
        )
    for entry in judged:
        if entry.source != winner.source and not entry.is_plausible:
            yield f"{name}: ignored implausible mpp {mpp_text(entry.mpp)} from {entry.source}"
    if winner.source == OBJECTIVE:
        yield (
            f"{name}: mpp {x:g} is only a guess from objective power {power:g}; "
            "pass --mpp-override if you know better"
        )
        return
    yield from _contradictions(name, winner, judged, power)


def _contradictions(
    name: str, winner: Candidate, judged: Sequence[Candidate], power: float | None
) -> Iterable[str]:
    tolerance = ANISOTROPY_TOLERANCE if winner.is_override else CONTRADICTION_TOLERANCE
    for entry in judged:
        if entry.used or not entry.is_plausible or entry.source in (FALLBACK, OBJECTIVE):
            continue
        if max(map(relative_difference, entry.mpp, winner.mpp)) > tolerance:
            yield (
                f"{name}: mpp {mpp_text(winner.mpp)} from {winner.source} contradicts "
                f"{mpp_text(entry.mpp)} from {entry.source}"
            )
            break  # one warning is enough; `info` lists every claim
        if winner.is_override:
            break  # what the file means without it is its first claim
    if power is not None and not winner.is_override:
        ratio = math.sqrt(winner.mpp[0] * winner.mpp[1]) * power / MPP_TIMES_POWER
        if max(ratio, 1 / ratio) > POWER_FACTOR_TOLERANCE:
            yield (
                f"{name}: mpp {mpp_text(winner.mpp)} from {winner.source} contradicts objective "
                f"power {power:g}, which means about {MPP_TIMES_POWER / power:g}; the mpp is used"
            )


def relative_difference(a: float, b: float) -> float:
    """How far two positive scales lie apart, as a share of the smaller one."""
    return abs(a - b) / min(a, b)


def mpp_text(mpp: tuple[float, float]) -> str:
    """One number, or both where they differ."""
    x, y = mpp
    return f"{x:.6g}" if x == y else f"{x:.6g} x {y:.6g}"


# ---- reading claims out of metadata ----


def parse_number(text: object) -> float | None:
    """A positive finite number out of a metadata field, None for anything else.

    Decimal commas occur (scanners with a German locale write them).
    """
    try:
        value = float(str(text).strip().strip('"').replace(",", "."))
    except ValueError:
        return None
    return value if math.isfinite(value) and value > 0 else None


def mpp_from_density(density: object, unit: object) -> float | None:
    """µm per pixel from pixels per unit.

    Args:
        density: Pixels per ``unit``.
        unit: Name of the unit, or the number of TIFF's ResolutionUnit.

    Returns:
        µm per pixel, None without a number or a unit of length.
    """
    value, um = parse_number(density), _um_per_unit(unit)
    return None if value is None or um is None else um / value


def _um_per_unit(unit: object) -> float | None:
    text = str(unit).strip().lower()
    text = _TIFF_UNITS.get(text, text).replace("\\u00b5", "µ")
    return _UM_PER_UNIT.get(text)


def claims_from_properties(properties: Mapping[str, str]) -> Claims:
    """What OpenSlide's properties say about the scale.

    Args:
        properties: As ``OpenSlide.properties``.

    Returns:
        The claims; vendor fields repeat what OpenSlide derives from them, so that a
        contradiction or a field that OpenSlide could not use is seen.
    """
    x = parse_number(properties.get("openslide.mpp-x"))
    y = parse_number(properties.get("openslide.mpp-y"))
    found = [entry for entry in _vendor_claims(properties) if entry is not None]
    notes = []
    tiff_x = parse_number(properties.get("tiff.XResolution"))
    if (
        tiff_x is not None
        and not found
        and _um_per_unit(properties.get("tiff.ResolutionUnit", "inch")) is None
    ):
        notes.append(f"TIFF resolution {tiff_x:g} has no unit of length")
    return Claims(
        openslide=_pair(x, y),
        fields=tuple(found),
        objective_power=parse_number(properties.get("openslide.objective-power"))
        or parse_number(properties.get("aperio.AppMag")),
        notes=tuple(notes),
    )


def _pair(x: float | None, y: float | None) -> tuple[float, float] | None:
    """Both axes; one alone stands for both."""
    if x is None and y is None:
        return None
    return (x or y or 0.0, y or x or 0.0)


def _claim(source: str, x: float | None, y: float | None) -> Candidate | None:
    mpp = _pair(x, y)
    return None if mpp is None else Candidate(source=source, mpp=mpp)


def _vendor_claims(properties: Mapping[str, str]) -> Iterable[Candidate | None]:
    get = properties.get
    yield _claim("aperio.MPP", parse_number(get("aperio.MPP")), None)
    if "aperio.MPP" not in properties:
        yield claim_from_description(get("tiff.ImageDescription") or get("openslide.comment"))
    unit = get("tiff.ResolutionUnit", "inch")
    if get("openslide.vendor") != "trestle":  # which has µm/px in these tags
        yield _claim(
            f"tiff.XResolution per {unit}",
            mpp_from_density(get("tiff.XResolution"), unit),
            mpp_from_density(get("tiff.YResolution"), unit),
        )
    for key in ("philips.DICOM_PIXEL_SPACING", "dicom.PixelSpacing"):
        yield _spacing_mm(key, get(key))
    measures = "dicom.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0].PixelSpacing"
    yield _spacing_mm(measures, f"{get(measures + '[0]')} {get(measures + '[1]')}")
    yield _claim("ventana.ScanRes", parse_number(get("ventana.ScanRes")), None)
    keys = sorted(key for key in properties if key.endswith("MICROMETER_PER_PIXEL_X"))
    for key in keys[:1]:
        yield _claim(key, parse_number(get(key)), parse_number(get(key[:-1] + "Y")))
    nm = parse_number(get("hamamatsu.PhysicalWidth"))
    if nm is not None and get("openslide.level[0].width"):
        height = parse_number(get("hamamatsu.PhysicalHeight"))
        width_px = parse_number(get("openslide.level[0].width")) or 1.0
        height_px = parse_number(get("openslide.level[0].height")) or 1.0
        yield _claim(
            "hamamatsu.PhysicalWidth",
            nm / 1000 / width_px,
            None if height is None else height / 1000 / height_px,
        )


def _spacing_mm(source: str, text: str | None) -> Candidate | None:
    """DICOM pixel spacing: rows first, then columns, in mm."""
    numbers = [parse_number(part) for part in re.split(r"[\s\\]+", text or "") if part]
    if not numbers or numbers[0] is None:
        return None
    y = numbers[0] * 1000
    x = numbers[1] * 1000 if len(numbers) > 1 and numbers[1] is not None else y
    return Candidate(source=source, mpp=(x, y))


_DESCRIPTION_MPP = re.compile(
    r"\b(?:mpp|micronsPerPixel)(_?[xy])?\s*[=:]\s*([\d.,]+)", re.IGNORECASE
)


def claim_from_description(text: str | None) -> Candidate | None:
    """µm/px out of an ImageDescription: OME-XML, Aperio's ``MPP = ``, or ImageJ's unit."""
    if not text:
        return None
    if "<OME" in text[:4096] or "openmicroscopy.org" in text[:4096]:
        return _claim_from_ome(text)
    found = {
        (axis or "").strip("_").lower(): value for axis, value in _DESCRIPTION_MPP.findall(text)
    }
    if found:
        both = parse_number(found.get(""))
        return _claim(
            "ImageDescription MPP",
            parse_number(found.get("x")) or both,
            parse_number(found.get("y")) or both,
        )
    return None


def _claim_from_ome(text: str) -> Candidate | None:
    """PhysicalSizeX and Y of the largest image of an OME-XML document."""
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError:
        return None
    images = [node for node in root.iter() if node.tag.rsplit("}", 1)[-1] == "Pixels"]
    if not images:
        return None
    pixels = max(images, key=lambda node: parse_number(node.get("SizeX")) or 0)
    sizes = []
    for axis in "XY":
        size = parse_number(pixels.get(f"PhysicalSize{axis}"))
        um = _um_per_unit(pixels.get(f"PhysicalSize{axis}Unit", "µm"))
        sizes.append(None if size is None or um is None else size * um)
    return _claim("OME PhysicalSizeX", sizes[0], sizes[1])
