"""Which slides a run is about: from files, folders, globs, CSV lists and standard input.

Every path given ends in exactly one of three places: a slide of the run, the list of what was
skipped with the reason, or an error that stops the run before it starts. Nothing is dropped in
silence. No slide is opened here; of DICOM files the first few kilobytes are read, for the series
they belong to.
"""

import glob
import os
import re
import stat
import sys
import unicodedata
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import NamedTuple, TextIO

from bioptimus.batch.dicom_series import DicomFolder, may_be_dicom
from bioptimus.batch.lists import LIST_EXTENSION, Row, listed_relative, parse_list, read_list
from bioptimus.counting import counted
from bioptimus.errors import OutputError, UsageError
from bioptimus.io.companions import LISTS_OF_PICTURES, companions
from bioptimus.io.refusals import why_unreadable

# Longest first: ``a.ome.tiff`` loses ``.ome.tiff``, not ``.tiff``.
SLIDE_EXTENSIONS = (
    ".ome.tiff",
    ".ome.tif",
    ".svslide",
    ".dicom",
    ".ndpi",
    ".mrxs",
    ".tiff",
    ".svs",
    ".tif",
    ".scn",
    ".bif",
    ".vms",
    ".vmu",
    ".czi",
    ".dcm",
)

# Taken when named, not when met in a folder: there they are thumbnails and figures.
PICTURE_EXTENSIONS = (".jpeg", ".jpg", ".png")
_PICTURE = "picture; taken only when named"

# People name lists so, but other files as well.
_TEXT_EXTENSIONS = (".txt", ".tsv", ".lst", ".list")

# Slide formats that people have and OpenSlide cannot read: worth a word of their own.
FOREIGN_EXTENSIONS = {
    ".vsi": "Olympus/Evident",
    ".ets": "Olympus/Evident",
    ".isyntax": "Philips",
    ".i2syntax": "Philips",
    ".ndpis": "Hamamatsu multi-channel",
    ".lif": "Leica",
    ".nd2": "Nikon",
    ".kfb": "KFBio",
    ".sdpc": "SQRAY",
    ".mds": "Motic",
    ".tmap": "UNIC",
}

# File systems take 255 bytes, and a run makes <name>.claim.<32 digits>.now beside a result.
_LONGEST_RESULT_NAME = 255 - len(".claim.") - 32 - len(".now")


@dataclass(frozen=True, kw_only=True)
class SlideInput:
    """One slide of the run, with what its list says about it.

    Attributes:
        path: The file to open, as given or found; of a DICOM series the first file by name.
        relative: Where the slide lies below the folder given, file name included; decides
            where its result goes.
        mpp: µm per pixel at level 0 from the list, which overrides what the file says.
        mask: Tissue mask file from the list.
        bulk_rna: Bulk RNA file from the list.
        extra: Further columns of the list, unread.
        size_bytes: Size of the slide from the list; ``size()`` looks it up where it is absent.
        series: Every file of the DICOM series, in order of name; empty for other slides.
        problem: Why this input cannot be processed, such as a missing file, without its name;
            the slide fails with these words and the others go on.
    """

    path: Path
    relative: PurePath
    mpp: float | None = None
    mask: Path | None = None
    bulk_rna: Path | None = None
    extra: Mapping[str, str] = field(default_factory=dict, hash=False)
    size_bytes: int | None = None
    series: tuple[Path, ...] = ()
    problem: str | None = None

    def files(self) -> tuple[Path, ...]:
        """List the slide's own file and its companions, in that order; looks at the disk."""
        if self.series:
            return (self.path, *(p for p in self.series if p != self.path))
        if may_be_dicom(self.path.name):
            series = DicomFolder.read(self.path.parent).series_of(self.path)
            return (self.path, *(p for p in series if p != self.path))
        return (self.path, *companions(self.path))

    def size(self) -> int:
        """Return the bytes of the slide with its companions; 0 where files are missing."""
        if self.size_bytes is not None:
            return self.size_bytes
        if self.problem is not None:
            return 0
        total = 0
        for path in self.files():
            try:
                total += path.stat().st_size
            except OSError:
                continue  # the slide's own opening says what is wrong with it
        return total


class Skipped(NamedTuple):
    """A file or folder that was met and is not part of the run."""

    path: Path
    reason: str


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The slides of a run, each once, and what was left out.

    Attributes:
        slides: In the order given; within a folder by path.
        skipped: With the reason; hidden folders and companion folders are one entry each.
        notes: What the user should know of the lists and folders, one sentence each.
    """

    slides: tuple[SlideInput, ...]
    skipped: tuple[Skipped, ...]
    notes: tuple[str, ...] = ()


def find_inputs(
    arguments: Sequence[str | Path],
    *,
    exclude: Sequence[Path] = (),
    stdin: TextIO | None = None,
    for_results: bool = True,
) -> Inputs:
    """Turn what the user typed into the slides of the run.

    Args:
        arguments: Slides, folders (searched to the bottom), globs that the shell left alone,
            ``.csv`` lists with a ``slide`` column, or ``-`` for such a list, or plain lines of
            paths, on standard input. Relative paths in a list file are relative to that file; on
            standard input, to the working directory.
        exclude: Folders not to search, such as the output folder; a note tells of slides there.
        stdin: Where ``-`` reads from; the process's standard input if not given.
        for_results: Each slide is to get a file of its own; two of one name are no fault of who
            only looks at them.

    Returns:
        Each slide once. A path that does not exist is a slide with a ``problem``.

    Raises:
        UsageError: Nothing was given, a folder, glob or list holds no slide, a list is malformed,
            one slide is given twice with different values, or the results of two slides would
            be the same file.
    """
    if not arguments:
        raise UsageError("no slides given; pass slides, folders, a CSV list, or - for a list")
    finder = _Finder(exclude, sys.stdin if stdin is None else stdin)
    for argument in arguments:
        finder.take_argument(str(argument))
    slides = tuple(finder.slides.values())
    if for_results:
        slides = tuple(map(_with_room_for_result, slides))
        _refuse_collisions(slides)
    notes = (*finder.notes, *finder.passed_over())
    return Inputs(slides=slides, skipped=tuple(finder.left_out()), notes=notes)


def output_path(out: Path, model_name: str, slide: SlideInput) -> Path:
    """Return where the slide's result goes: ``<out>/<model>/<relative folder>/<stem>.h5``."""
    return model_folder(out, model_name) / _output_key(slide)


def model_folder(out: Path, model_name: str) -> Path:
    """Return the folder of a model's results."""
    return out / _folder_name(model_name)


def strip_extension(name: str) -> str:
    """Remove one known extension, in upper or lower case; ``a.ome.tiff`` becomes ``a``."""
    lower = name.lower()
    for extension in (*SLIDE_EXTENSIONS, *PICTURE_EXTENSIONS):
        if lower.endswith(extension) and len(name) > len(extension):
            return name[: -len(extension)]
    return name


# Everything below turns arguments into slides.


class _Finder:
    """Collects slides, each once by its real path, and what was skipped."""

    def __init__(self, exclude: Sequence[Path], stdin: TextIO) -> None:
        self.slides: dict[str, SlideInput] = {}
        self.skipped: list[Skipped] = []
        self.notes: list[str] = []
        self._met = 0  # slides, also those met before
        self._stdin = stdin
        self._excluded = {os.path.realpath(path) for path in exclude}
        self._passed_over: dict[str, Path] = {}
        self._real_folders: dict[str, str] = {}
        self._dicom_folders: dict[Path, DicomFolder] = {}

    def take_argument(self, argument: str) -> None:
        path = Path(argument)
        if not argument:
            raise UsageError("an empty path was given; is a variable of the script not set?")
        if argument == "-":
            self._take_list("standard input", self._stdin.read(), folder=Path())
        elif os.path.isdir(path):  # false where Path.is_dir raises: the name may be anything
            self._take_folder(path, Row())
        elif glob.has_magic(argument) and not os.path.lexists(path):
            self._take_glob(argument)
        elif path.suffix.lower() == LIST_EXTENSION:
            self._take_list(argument, read_list(path), folder=path.parent)
        else:
            self._take_file(path, PurePath(path.name), Row())

    def left_out(self) -> Iterator[Skipped]:
        """What was skipped, but for pictures met in a folder that were named besides."""
        for skipped in self.skipped:
            if skipped.reason != _PICTURE or self._real_file(skipped.path) not in self.slides:
                yield skipped

    def passed_over(self) -> Iterator[str]:
        """Tell of slides in folders that were not searched, unless they were named."""
        for folder in self._passed_over.values():
            slides = [p for p in _slides_below(folder) if self._real_file(p) not in self.slides]
            if slides:
                yield (
                    f"{folder}: results go here, so it is not searched, and holds "
                    f"{counted(len(slides), 'slide')} that no result is made of, such as "
                    f"{slides[0]}; move them out of it or name them"
                )

    def _take_folder(self, folder: Path, row: Row) -> None:
        met, skipped = self._met, len(self.skipped)
        try:
            os.scandir(folder).close()
        except OSError as exc:
            raise UsageError(f"{folder}: this folder cannot be listed: {exc.strerror}") from exc
        if self._real_folder(folder) in self._excluded:
            raise UsageError(
                f"{folder}: results go to this very folder, so it is not searched for slides; "
                f"choose another one for them, such as {folder / 'results'}"
            )
        self._walk(folder, PurePath(), row)
        if self._met == met:
            told = "".join(f"; {words}" for words in self.passed_over())
            raise UsageError(
                f"{folder}: no slides in this folder{_summary(self.skipped[skipped:])}{told}"
            )

    def _walk(self, folder: Path, below: PurePath, row: Row) -> None:
        """Search a folder to the bottom, links to folders last: a slide keeps its real place."""
        seen: set[str] = set()
        waiting = deque([(folder, below)])
        while waiting:
            self._walk_real(*waiting.popleft(), row, seen, waiting)

    def _walk_real(
        self,
        folder: Path,
        below: PurePath,
        row: Row,
        seen: set[str],
        links: deque[tuple[Path, PurePath]],
    ) -> None:
        real = self._real_folder(folder)
        if real in self._excluded:
            self._passed_over.setdefault(real, folder)
            return
        if real in seen:
            self.skipped.append(Skipped(folder, "folder searched already, through a link"))
            return
        seen.add(real)
        try:
            with os.scandir(folder) as entries:
                names = sorted((entry.name, _is_folder(entry)) for entry in entries)
        except OSError as exc:
            # Slides may hide in it: the run must not end as if all had been done.
            problem = f"this folder cannot be listed: {exc.strerror}"
            self._add(real, SlideInput(path=folder, relative=below, problem=problem))
            return
        files = {name.lower() for name, is_folder in names if not is_folder}
        if _MIRAX_INDEX in files:
            self.skipped.append(Skipped(folder, "MIRAX data without the .mrxs file beside it"))
            return
        folders = []
        lists = [name for name in files if name.endswith(LISTS_OF_PICTURES)]
        pictures = {
            p for name, _ in names if name.lower() in lists for p in companions(folder / name)
        }
        for name, is_folder in names:
            path = folder / name
            if path in pictures:
                reason: str | None = f"companion: named by one of {', '.join(sorted(lists))}"
            else:
                reason = _folder_reason(path, files) if is_folder else _file_reason(path)
            if reason is not None:
                self.skipped.append(Skipped(path, reason))
            elif is_folder:
                folders.append(name)
            else:
                self._take_file(path, below / name, row, found=True)
        for name in folders:
            if (folder / name).is_symlink():
                links.append((folder / name, below / name))
            else:
                self._walk_real(folder / name, below / name, row, seen, links)

    def _take_glob(self, pattern: str) -> None:
        met, skipped = self._met, len(self.skipped)
        base = static_folder(pattern)
        extension = PurePath(pattern).suffix
        # ``*.png`` names pictures; ``*`` does not.
        names_kind = bool(extension) and not glob.has_magic(extension)
        for match in sorted(glob.glob(pattern, recursive=True)):
            path = Path(match)
            if path.is_dir():
                if "**" not in pattern:  # which matches what is in its folders by itself
                    self._walk(path, path.relative_to(base), Row())
            elif extension.lower() == LIST_EXTENSION:
                self.take_argument(match)
            elif not names_kind and (reason := _file_reason(path)):
                self.skipped.append(Skipped(path, reason))
            else:
                self._take_file(path, path.relative_to(base), Row(), found=True)
        if self._met == met:
            raise UsageError(
                f"{pattern}: no slide matches this pattern{_summary(self.skipped[skipped:])}"
            )

    def _take_list(self, name: str, text: str, *, folder: Path) -> None:
        met = self._met
        for slide, row in parse_list(name, text, folder, self.notes):
            path = folder / slide
            if os.path.isdir(path):
                self._take_listed_folder(name, path, row)
            else:
                self._take_file(path, listed_relative(slide, folder), row)
        if self._met == met:
            raise UsageError(f"{name}: no slides in this list")

    def _take_listed_folder(self, name: str, folder: Path, row: Row) -> None:
        met = self._met
        self._take_folder(folder, row)
        if row != Row() and self._met - met > 1:
            raise UsageError(
                f"{name}: {folder} is a folder of {self._met - met} slides, so its row can hold "
                "no values; give each slide a row"
            )

    def _take_file(self, path: Path, relative: PurePath, row: Row, *, found: bool = False) -> None:
        """Add one slide; ``found`` says that it was met in a folder rather than named."""
        problem = _problem(path)
        series: tuple[Path, ...] = ()
        if problem is None and may_be_dicom(path.name):
            dicom = self._dicom_folder(path.parent)
            if found and (reason := dicom.not_a_slide(path)):
                self.skipped.append(Skipped(path, reason))
                return
            series = dicom.series_of(path)
            if series and path != series[0]:
                if found:
                    reason = f"companion: same DICOM series as {series[0].name}"
                    self.skipped.append(Skipped(path, reason))
                    return
                path = series[0]
            # However it is named, the series is one slide with one result.
            relative = self._series_name(dicom, series, relative) if series else relative
        slide = SlideInput(
            path=path,
            relative=row.relative or relative,
            mpp=row.mpp,
            mask=row.mask,
            bulk_rna=row.bulk_rna,
            extra=row.extra,
            size_bytes=row.size_bytes,
            series=series if len(series) > 1 else (),
            problem=problem,
        )
        # What cannot be looked at has no real path either.
        key = self._real_file(path) if problem is None else os.path.abspath(path)
        self._add(key, slide)

    def _series_name(
        self, dicom: "DicomFolder", series: Sequence[Path], relative: PurePath
    ) -> PurePath:
        """Return what a DICOM series is named after: its folder, where it is the only one there.

        Its files are usually named by numbers that tell nobody which slide it is. A series of
        one file, or beside another one, keeps the name of its first file.
        """
        if len(series) == 1 or not dicom.is_only(series[0]):
            return relative.with_name(series[0].name)
        if relative.parent.name:
            return relative.parent
        return PurePath(PurePath(self._real_folder(series[0].parent)).name or series[0].name)

    def _add(self, key: str, slide: SlideInput) -> None:
        self._met += 1
        first = self.slides.setdefault(key, slide)
        if first is slide:
            return
        ours, theirs = ((s.mpp, s.mask, s.bulk_rna) for s in (first, slide))
        if ours != theirs:
            raise UsageError(
                f"{slide.path}: given twice with different mpp, mask or bulk_rna; "
                "keep one of the rows"
            )
        if os.path.abspath(slide.path) == key != os.path.abspath(first.path):
            # A link was met first; the slide is taken where it is.
            self.slides[key] = slide
            first, slide = slide, first
        if first.path == slide.path:
            reason = "given twice"
        elif slide.path.is_symlink() and not first.path.is_symlink():
            reason = f"link to {first.path}"
        else:
            reason = f"same file as {first.path}"
        self.skipped.append(Skipped(slide.path, reason))

    def _dicom_folder(self, folder: Path) -> "DicomFolder":
        if folder not in self._dicom_folders:
            self._dicom_folders[folder] = DicomFolder.read(folder)
        return self._dicom_folders[folder]

    def _real_folder(self, folder: Path) -> str:
        key = str(folder)
        if key not in self._real_folders:
            self._real_folders[key] = os.path.realpath(folder)
        return self._real_folders[key]

    def _real_file(self, path: Path) -> str:
        # Resolving the folder once spares a look at each part of the path for every slide.
        if path.is_symlink():
            return os.path.realpath(path)
        return os.path.join(self._real_folder(path.parent), path.name)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False  # then it is met as a file, whose problem is told


def _folder_reason(path: Path, files_beside: set[str]) -> str | None:
    """Say why a folder is not searched; None to search it."""
    if path.name.startswith("."):
        return "hidden"
    name = path.name.lower()
    if f"{name}.mrxs" in files_beside and (path / "Slidedat.ini").exists():
        return "companion: data of the .mrxs file beside it"
    if name[:1] == name[-1:] == "_" and f"{name[1:-1]}.vsi" in files_beside:
        return "companion: data of the .vsi file beside it"
    return None


def _file_reason(path: Path) -> str | None:
    """Say why a file met in a folder is not a slide, by its name; None if it may be one."""
    name = path.name.lower()
    if name.startswith("."):
        return "hidden"
    if name.endswith(SLIDE_EXTENSIONS) or may_be_dicom(name):
        return None
    if name.endswith(PICTURE_EXTENSIONS):
        return _PICTURE
    return _foreign(path) or "unknown extension"


def _slides_below(folder: Path) -> list[Path]:
    """Files whose names are those of slides; results and pictures have others."""
    return sorted(
        Path(place, name)
        for place, _, names in os.walk(folder)
        for name in names
        if name.lower().endswith(SLIDE_EXTENSIONS) and not name.startswith(".")
    )


def _foreign(path: Path) -> str | None:
    maker = FOREIGN_EXTENSIONS.get(path.suffix.lower())
    if maker is None:
        return None
    return f"{maker} format that OpenSlide cannot read; convert it to OME-TIFF or DICOM"


def _problem(path: Path) -> str | None:
    """Say why a path cannot be a slide, before it is opened; None if it may be one."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        with suppress(OSError):  # no link, or gone by now
            return f"a link to {os.readlink(path)}, which is not there; mount or copy the target"
        if glob.has_magic(str(path)):  # those that were typed have been searched for
            return "no such file, and patterns in a list are not searched for; check the path"
        return "no such file; check the path"
    except OSError as exc:
        return why_unreadable(exc)
    except ValueError:
        return "its path holds a NUL byte; correct the list"
    try:
        str(path.absolute()).encode()
    except UnicodeEncodeError:
        return "its path is not in UTF-8, so that no result can name it; rename what is not"
    if not stat.S_ISREG(mode):
        return "neither a file nor a folder"
    if path.suffix.lower() in _TEXT_EXTENSIONS:
        return "no slide; a list of slides ends in .csv, or is read with - in place of its name"
    return _foreign(path) or _result(path)


def _result(path: Path) -> str | None:
    """Say of a result of ours what it is; None of any other file."""
    if path.suffix.lower() != ".h5":
        return None
    # Here, since it loads h5py.
    from bioptimus.inference.results import open_result

    try:
        slide = open_result(path).attributes["slide_name"]
    except OutputError:
        return None
    return (
        f"no slide but a result of bioptimus, of the slide {slide}; bioptimus verify, view and "
        "convert read it, and bioptimus report its folder"
    )


def static_folder(pattern: str) -> Path:
    """Return the part of a glob before its first wildcard."""
    parts = PurePath(pattern).parts[:-1]
    fixed = next((n for n, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    return Path(*parts[:fixed])


def _summary(skipped: Sequence[Skipped]) -> str:
    if not skipped:
        return ""
    # "companion: data of ..." and "companion: same series as ..." are one kind.
    kinds = Counter(re.split("[:;]", s.reason)[0] for s in skipped)
    told = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(4))
    return f"; {len(skipped)} skipped: {told}"


def _with_room_for_result(slide: SlideInput) -> SlideInput:
    """The slide, or as one with a problem where no file system takes its result's name."""
    length = len(os.fsencode(_output_key(slide).name))
    if slide.problem is not None or length <= _LONGEST_RESULT_NAME:
        return slide
    problem = (
        f"its result's name would take {length} bytes, and {_LONGEST_RESULT_NAME} leave room for "
        "what lies beside it; rename the slide, or list it with a column relative_path"
    )
    return replace(slide, problem=problem)


def _refuse_collisions(slides: Sequence[SlideInput]) -> None:
    taken: dict[str, SlideInput] = {}
    pairs: list[tuple[SlideInput, SlideInput]] = []
    for slide in slides:
        if slide.problem is not None:
            continue  # makes no result
        key = str(_output_key(slide))
        if sys.platform == "darwin":
            # Its file systems usually take upper and lower case, and both ways of writing an
            # accent, for the same name.
            key = unicodedata.normalize("NFC", key).casefold()
        first = taken.setdefault(key, slide)
        if first is not slide:
            pairs.append((first, slide))
    if not pairs:
        return
    first, slide = pairs[0]
    more = f" (and {len(pairs) - 1} more such)" if len(pairs) > 1 else ""
    raise UsageError(
        f"{first.path} and {slide.path} would both be written to {_output_key(first)}{more}; "
        f"{_way_out(first, slide)}, or give a CSV list whose column relative_path tells them apart"
    )


def _way_out(first: SlideInput, second: SlideInput) -> str:
    """What to do about two slides that would get one result, short of writing a list."""
    one, other = first.path, second.path
    if one.parent == other.parent and one.suffix != other.suffix:
        return (
            f"if one is a copy of the other, give only '{one.parent / f'*{one.suffix}'}', else "
            "run each kind with an --out of its own"
        )
    if one.parent != other.parent and not (first.series or second.series):
        return "give the folder above both"
    return "rename one"


def _output_key(slide: SlideInput) -> PurePath:
    return slide.relative.with_name(strip_extension(slide.relative.name) + ".h5")


def _folder_name(model_name: str) -> str:
    name = re.sub(r"[^\w.+-]+", "-", model_name).strip(".-")
    if not name:
        raise UsageError(f"model name {model_name!r}: no folder can be named after it")
    return name


# Slides of several files.

_MIRAX_INDEX = "slidedat.ini"
