"""What a ``.pt2`` file is, read without torch and without running anything from it.

Loading a checkpoint runs code, checks little, and on some damaged files kills the process.
So every file is looked at first: kind, integrity of each member, the machine that compiled
code needs, the shapes that the program takes, and the description that our export put inside.
"""

import contextlib
import errno
import hashlib
import json
import logging
import os
import platform
import re
import stat
import struct
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from bioptimus.errors import CheckpointError, NoCheckpointError
from bioptimus.models.types import ModelSpec
from bioptimus.runtime.cache import beside, cache_folder

log = logging.getLogger(__name__)

DESCRIPTION = "bioptimus.json"
"""Member of a portable archive (below ``extra/``) that holds the ModelSpec."""
DESCRIPTION_KEY = "bioptimus"
"""The same in the metadata of a compiled archive, which takes strings only."""

# torch's numbers for element types in the archive's JSON.
_DTYPES = {
    1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float16", 7: "float32",
    8: "float64", 9: "complex32", 10: "complex64", 11: "complex128", 12: "bool", 13: "bfloat16",
}  # fmt: skip
_ELF_MACHINES = {"x86_64": 62, "aarch64": 183}
# The program of a large model is a few megabytes; a member beyond this is no program.
_LARGEST_JSON_BYTES = 1 << 26
# torch stores members as they are; some zip tools press them, weights by a quarter at best.
_LARGEST_RATIO = 20
# A program of one fixed batch gets that many tiles however few there are.
_LARGEST_FIXED_BATCH = 1 << 12


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """What a program says about one input or output.

    Attributes:
        dtype: Such as ``uint8`` or ``float32``.
        shape: Sizes of each row, that is, without the batch.
    """

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        """Such as ``uint8 (N, 224, 224, 3)``."""
        return f"{self.dtype} ({', '.join(['N', *map(str, self.shape)])})"


@dataclass(frozen=True, kw_only=True)
class Signature:
    """Inputs, outputs and batch lengths that a program was exported for.

    Attributes:
        inputs: In the order of the call.
        outputs: In the order of the returned tuple.
        min_batch: Fewest rows of one call.
        max_batch: Most rows. None: no limit.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    min_batch: int = 1
    max_batch: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-ready types; :meth:`from_dict` reads it back."""
        return {
            "inputs": [[spec.dtype, list(spec.shape)] for spec in self.inputs],
            "outputs": [[spec.dtype, list(spec.shape)] for spec in self.outputs],
            "min_batch": self.min_batch,
            "max_batch": self.max_batch,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Signature":
        """Read what :meth:`to_dict` wrote.

        Raises:
            CheckpointError: Something is missing or of the wrong type.
        """
        try:
            specs = {
                key: tuple(
                    TensorSpec(dtype=str(dtype), shape=tuple(int(size) for size in shape))
                    for dtype, shape in values[key]
                )
                for key in ("inputs", "outputs")
            }
            upper = values["max_batch"]
            return cls(
                inputs=specs["inputs"],
                outputs=specs["outputs"],
                min_batch=int(values["min_batch"]),
                max_batch=None if upper is None else int(upper),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as exc:
            raise CheckpointError(f"description of the program cannot be read: {exc}") from exc


@dataclass(frozen=True, kw_only=True)
class ArchiveInfo:
    """What a ``.pt2`` says about itself.

    Attributes:
        path: The file.
        kind: ``portable`` (``torch.export``, runs on any machine with torch) or ``compiled``
            (AOTInductor, machine code for one kind of machine).
        size_bytes: Size of the file.
        root: Name of the folder inside the archive that holds everything.
        model_name: Name of the program inside the archive.
        signature: What the program takes and gives; None for a compiled file that is not ours.
        torch_version: Version of torch that wrote it; empty if not known.
        device: ``cpu`` or ``cuda``; ``any`` for a portable file exported on a CPU, which moves
            to either.
        isa: CPU features that compiled code uses, such as ``AVX512 AVX512_VNNI``.
        machine: Such as ``x86_64``; empty for portable files.
        system: Such as ``linux``; empty for portable files.
        compute_capability: GPU architecture of compiled code, such as ``90``.
        spec: The ModelSpec that our export wrote; None for foreign files.
        source_sha256: For a compiled file of ours: digest of the portable file it came from.
        library: For a compiled file: member that holds the machine code.
        batch_limit: For a compiled file: most rows of one call, as its own check states them.
        needs_proxy: The compiled program calls operators that only torch's own loader can run.
    """

    path: Path
    kind: Literal["portable", "compiled"]
    size_bytes: int
    root: str
    model_name: str
    signature: Signature | None
    torch_version: str = ""
    device: str = "any"
    isa: str = ""
    machine: str = ""
    system: str = ""
    compute_capability: str = ""
    spec: ModelSpec | None = None
    source_sha256: str = ""
    library: str = ""
    batch_limit: int | None = None
    needs_proxy: bool = False


def inspect_archive(path: Path) -> ArchiveInfo:
    """Read what a ``.pt2`` is, verifying every byte of it against the archive's checksums.

    Nothing from the file is run and torch is not imported. The verification of a large file
    takes seconds and is remembered in the user's cache until the file changes.

    Args:
        path: The checkpoint.

    Returns:
        What the file says about itself.

    Raises:
        CheckpointError: Missing, empty, truncated, damaged, or another kind of file; the
            message says which and what to do.
    """
    try:
        _refuse_what_is_no_archive(path)
        with zipfile.ZipFile(path) as archive:
            info = _read_archive(path, archive)
            _verify_members(path, archive)
    except CheckpointError:
        raise
    # Offsets of a damaged archive make what reads them raise a plain ValueError too.
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, ValueError) as exc:
        raise CheckpointError(f"{path}: damaged archive ({exc}); copy the file again") from exc
    except OSError as exc:
        if exc.errno == errno.EINVAL:  # an offset that no file has
            raise CheckpointError(f"{path}: damaged archive; copy the file again") from exc
        raise CheckpointError(f"{path}: {exc.strerror or exc}") from exc
    return info


def file_sha256(path: Path) -> str:
    """SHA-256 of a file in hexadecimal, remembered in the user's cache until the file changes.

    Raises:
        CheckpointError: The file cannot be read.
    """
    try:
        return _remembered(path, "sha256", _digest)
    except OSError as exc:
        raise CheckpointError(f"{path}: {exc.strerror or exc}") from exc


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _remembered(path: Path, what: str, find: Any) -> str:
    """``find(path)``, or what it gave when this very file was asked about before.

    The change time is part of the key: no program can set it, so a file that was altered in
    place and given its old modification time is read again.
    """
    status = path.stat()
    identity = "|".join(
        map(str, (path.resolve(), status.st_ino, status.st_size, status.st_mtime_ns,
                  status.st_ctime_ns, what))
    )  # fmt: skip
    entry = cache_folder("checksums") / hashlib.sha256(identity.encode()).hexdigest()
    with contextlib.suppress(OSError):
        if found := entry.read_text(encoding="utf-8"):
            return found
    value: str = find(path)
    after = path.stat()
    if (after.st_size, after.st_mtime_ns) == (status.st_size, status.st_mtime_ns):
        _write_quietly(entry, value)
    return value


def _write_quietly(entry: Path, value: str) -> None:
    temporary = beside(entry)
    try:
        temporary.write_text(value, encoding="utf-8")
        temporary.replace(entry)
    except OSError as exc:
        # A full disk costs the next start some seconds, nothing else.
        log.debug("cannot remember a checksum: %s", exc)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _refuse_what_is_no_archive(path: Path) -> None:
    if os.path.isdir(path):
        raise NoCheckpointError(
            f"{path}: a folder, not a .pt2 file; `bioptimus models export` makes one from a "
            "folder of weights"
        )
    try:
        with path.open("rb") as file:
            head = file.read(64)
    except FileNotFoundError:
        raise NoCheckpointError(f"{path}: no such file") from None
    except OSError as exc:
        raise CheckpointError(f"{path}: {exc.strerror or exc}") from exc
    if not head:
        raise CheckpointError(f"{path}: empty file; copy or export it again")
    if zipfile.is_zipfile(path):
        return
    if head.startswith(b"PK"):
        raise CheckpointError(f"{path}: truncated archive (its end is missing); copy it again")
    if head.startswith(b"\x80"):
        kind = "a pickled torch.save file, not a .pt2"
    elif head[8:9] == b"{" and int.from_bytes(head[:8], "little") < path.stat().st_size:
        kind = "a safetensors file, weights without a program"
    elif head.startswith(b"version https://git-lfs"):
        kind = "a Git LFS pointer; fetch the file itself with `git lfs pull`"
    else:
        kind = "not a .pt2 archive"
    advice = "" if "LFS" in kind else "; `bioptimus models export` makes one from weights"
    raise CheckpointError(f"{path}: {kind}{advice}")


def _read_archive(path: Path, archive: zipfile.ZipFile) -> ArchiveInfo:
    names = archive.namelist()
    # A member may be an archive itself: cut short behind it, the file seems to be that one.
    if names and min(entry.header_offset for entry in archive.infolist()) > 0:
        raise CheckpointError(f"{path}: truncated archive (its end is missing); copy it again")
    root = names[0].split("/")[0] if names else ""
    inner = {name[len(root) + 1 :]: name for name in names if name.startswith(root + "/")}
    if problem := _hostile(archive.infolist(), path.stat().st_size):
        raise CheckpointError(f"{path}: {problem}; do not trust this file")
    if "archive_format" not in inner or _read(path, archive, inner["archive_format"]) != b"pt2":
        raise CheckpointError(f"{path}: {_foreign_kind(names, inner)}")
    programs = [name for name in inner if re.fullmatch(r"models/[^/]+\.json", name)]
    metadata = [
        name for name in inner if re.fullmatch(r"data/aotinductor/[^/]+/.*_metadata.json", name)
    ]
    if bool(programs) == bool(metadata) or len(programs) > 1:
        found = "no model" if not programs and not metadata else "more than one model"
        raise CheckpointError(f"{path}: holds {found}; one is needed")
    if programs:
        return _read_portable(path, archive, root=root, inner=inner, program=programs[0])
    return _read_compiled(path, archive, root=root, inner=inner, metadata=metadata)


def _hostile(entries: list[zipfile.ZipInfo], size_bytes: int) -> str:
    """What no program that writes ``.pt2`` files would put into one; empty if nothing is odd."""
    names = [entry.filename for entry in entries]
    if any(name.startswith("/") or ".." in name.split("/") for name in names):
        return "members lie outside the archive"
    if not all(map(str.isprintable, names)):
        return "members have control characters in their names"
    # One reader takes the first of two, another the last; torch's looks at no capitals.
    if len({name.casefold() for name in names}) < len(names):
        return "two members have the same name"
    if any(stat.S_ISLNK(entry.external_attr >> 16) for entry in entries):
        return "members are links"
    if any(entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
           for entry in entries):  # fmt: skip
        return "members are compressed in an unusual way"
    whole = sum(entry.file_size for entry in entries)
    if whole > max(_LARGEST_JSON_BYTES, _LARGEST_RATIO * size_bytes):
        return f"{size_bytes} bytes claim to unpack to {whole}"
    return ""


def _foreign_kind(names: list[str], inner: Mapping[str, str]) -> str:
    if "constants.pkl" in inner or any(name.startswith("code/") for name in inner):
        return "a TorchScript file, not a .pt2; export the model with torch.export"
    if "data.pkl" in inner:
        return "a torch.save file, not a .pt2; `bioptimus models export` makes one from weights"
    if "serialized_exported_program.json" in names:
        return "a .pt2 of an old torch; export it again with torch 2.13 or later"
    return "a zip archive, but not a .pt2"


def _read(path: Path, archive: zipfile.ZipFile, name: str) -> bytes:
    if archive.getinfo(name).file_size > _LARGEST_JSON_BYTES:
        raise CheckpointError(f"{path}: {name} is too large to be what it should be")
    try:
        return archive.read(name)
    except RuntimeError as exc:  # an encrypted member
        raise CheckpointError(f"{path}: {exc}") from exc


def _read_json(path: Path, archive: zipfile.ZipFile, name: str) -> Any:
    try:
        return json.loads(_read(path, archive, name))
    except (ValueError, RecursionError) as exc:
        raise CheckpointError(f"{path}: {name} cannot be read: {exc}") from exc


def _spec_of(path: Path, values: Any) -> ModelSpec:
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: its description of the model cannot be read")
    try:
        return ModelSpec.from_dict(values)
    except CheckpointError as exc:
        raise CheckpointError(f"{path}: {exc}; export it again, or do not trust it") from exc


def _read_portable(
    path: Path, archive: zipfile.ZipFile, *, root: str, inner: Mapping[str, str], program: str
) -> ArchiveInfo:
    content = _read_json(path, archive, inner[program])
    try:
        signature, device = _portable_signature(path, content)
        version = str(content["torch_version"])
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as exc:
        raise CheckpointError(f"{path}: program of an unknown form ({exc!r})") from exc
    spec = None
    if f"extra/{DESCRIPTION}" in inner:
        spec = _spec_of(path, _read_json(path, archive, inner[f"extra/{DESCRIPTION}"]))
    return ArchiveInfo(
        path=path,
        kind="portable",
        size_bytes=path.stat().st_size,
        root=root,
        model_name=program.removeprefix("models/").removesuffix(".json"),
        signature=signature,
        torch_version=version,
        device="any" if device == "cpu" else device,
        spec=spec,
    )


def _portable_signature(path: Path, content: Mapping[str, Any]) -> tuple[Signature, str]:
    """What the program takes and gives, and the kind of device that it was exported on."""
    module = content["graph_module"]
    values = module["graph"]["tensor_values"]
    inputs = [
        values[entry["user_input"]["arg"]["as_tensor"]["name"]]
        for entry in module["signature"]["input_specs"]
        if "user_input" in entry
    ]
    outputs = [
        values[entry["user_output"]["arg"]["as_tensor"]["name"]]
        for entry in module["signature"]["output_specs"]
        if "user_output" in entry
    ]
    batch = inputs[0]["sizes"][0]
    lower: int = 1
    upper: int | None = None
    if "as_int" in batch:
        lower = upper = int(batch["as_int"])
    else:
        symbol = re.match(r"Symbol\('(\w+)'|(\w+)$", batch["as_expr"]["expr_str"])
        if symbol is None:  # such as 8 times another dimension
            raise CheckpointError(
                f"{path}: takes only some numbers of tiles, such as multiples; export it with a "
                "dimension of its own for them, from 1 on"
            )
        bounds = content["range_constraints"].get(symbol[1] or symbol[2], {})
        lower = max(1, int(bounds.get("min_val") or 1))
        upper = None if bounds.get("max_val") is None else int(bounds["max_val"])
    if not 1 <= lower <= (lower if upper is None else upper) or lower > _LARGEST_FIXED_BATCH:
        raise ValueError(f"batches of {lower} to {upper}")
    signature = Signature(
        inputs=tuple(map(_tensor_spec, inputs)),
        outputs=tuple(map(_tensor_spec, outputs)),
        min_batch=lower,
        max_batch=upper,
    )
    return signature, str(inputs[0]["device"]["type"])


def _tensor_spec(value: Mapping[str, Any]) -> TensorSpec:
    return TensorSpec(
        dtype=_DTYPES.get(value["dtype"], f"type {value['dtype']!r}"),
        shape=tuple(int(size["as_int"]) for size in value["sizes"][1:]),
    )


def _read_compiled(
    path: Path,
    archive: zipfile.ZipFile,
    *,
    root: str,
    inner: Mapping[str, str],
    metadata: list[str],
) -> ArchiveInfo:
    folders = {name.split("/")[2] for name in metadata}
    if len(folders) > 1:
        raise CheckpointError(f"{path}: holds more than one model ({', '.join(sorted(folders))})")
    wrappers = [name for name in metadata if name.endswith("wrapper_metadata.json")]
    libraries = [
        name for name in inner
        if name.startswith(f"data/aotinductor/{next(iter(folders))}/") and name.endswith(".so")
    ]  # fmt: skip
    if len(libraries) != 1:
        raise CheckpointError(
            f"{path}: holds {len(libraries)} libraries of machine code; one is needed"
        )
    facts = _read_json(path, archive, inner[(wrappers or metadata)[0]])
    if not isinstance(facts, dict):
        raise CheckpointError(f"{path}: its metadata cannot be read")
    machine = str(facts.get("AOTI_MACHINE", ""))
    _check_elf(path, archive, inner[libraries[0]])
    limit = _stated_batch_limit(path, archive, inner)
    own: dict[str, Any] = {}
    signature = None
    if DESCRIPTION_KEY in facts:
        try:
            own = dict(json.loads(facts[DESCRIPTION_KEY]))
            signature = Signature.from_dict(own["signature"]) if "signature" in own else None
        except (TypeError, ValueError, RecursionError) as exc:
            raise CheckpointError(f"{path}: its description cannot be read: {exc}") from exc
    if signature is not None and limit is not None:
        # Compiling may narrow what was exported.
        signature = replace(signature, max_batch=min(limit, signature.max_batch or limit))
    return ArchiveInfo(
        path=path,
        kind="compiled",
        size_bytes=path.stat().st_size,
        root=root,
        model_name=next(iter(folders)),
        signature=signature,
        torch_version=str(own.get("torch", "")),
        device=str(facts.get("AOTI_DEVICE_KEY", "")) or "cpu",
        isa=str(facts.get("AOTI_CPU_ISA", "")),
        machine=machine,
        system=str(facts.get("AOTI_PLATFORM", "")),
        compute_capability=str(facts.get("AOTI_COMPUTE_CAPABILITY", "")),
        spec=_spec_of(path, own["spec"]) if own.get("spec") else None,
        source_sha256=str(own.get("source_sha256", "")),
        library=libraries[0],
        batch_limit=limit,
        needs_proxy=any(
            name.startswith(f"data/aotinductor/{next(iter(folders))}/")
            and name.endswith("wrapper.json")
            for name in inner
        ),
    )


_BATCH_LIMIT = re.compile(
    rb'input_handles\[0\]: dim value is too large at 0, "\s*<< "expected to be <= (\d+),'
)


def _stated_batch_limit(
    path: Path, archive: zipfile.ZipFile, inner: Mapping[str, str]
) -> int | None:
    """The largest batch, from the source of the program's input check, which travels with it."""
    for name in inner:
        if name.endswith(".wrapper.cpp"):
            found = _BATCH_LIMIT.search(_read(path, archive, inner[name]))
            if found:
                return int(found.group(1))
    return None


def _check_elf(path: Path, archive: zipfile.ZipFile, library: str) -> None:
    """Refuse machine code that is cut short or of another machine: loading it kills the process."""
    if platform.system() != "Linux":
        return
    with archive.open(library) as file:
        head = file.read(64)
    size = archive.getinfo(library).file_size
    wanted = _ELF_MACHINES.get(platform.machine())
    if len(head) < 64 or head[:5] != b"\x7fELF\x02":
        raise CheckpointError(f"{path}: its machine code is damaged; copy or compile it again")
    found = struct.unpack_from("<H", head, 18)[0]
    if wanted is not None and found != wanted:
        names = {number: name for name, number in _ELF_MACHINES.items()}
        raise CheckpointError(
            f"{path}: compiled for {names.get(found, f'machine {found}')}, this is a "
            f"{platform.machine()}; use the portable file"
        )
    (table,) = struct.unpack_from("<Q", head, 40)
    entry_bytes, entries = struct.unpack_from("<HH", head, 58)
    if table + entry_bytes * entries > size:
        raise CheckpointError(f"{path}: its machine code is cut short; copy or compile it again")


def _verify_members(path: Path, archive: zipfile.ZipFile) -> None:
    """Read every member against its checksum: no loader does, and wrong weights load quietly."""

    def verify(_: Path) -> str:
        try:
            bad = archive.testzip()
        except RuntimeError as exc:
            raise CheckpointError(f"{path}: {exc}") from exc
        if bad:
            raise CheckpointError(f"{path}: {bad} is damaged (wrong checksum); copy it again")
        return "whole"

    _remembered(path, "members", verify)
