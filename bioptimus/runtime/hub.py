"""Weights on the Hugging Face hub: what there is under which terms, and then the files.

The hub's own client keeps them in its cache, where other programs find them too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bioptimus.errors import CheckpointError
from bioptimus.runtime.archive import file_sha256
from bioptimus.runtime.runners import first_line

_CONFIGURATION = ("config.json", "preprocessor_config.json")
# The first that there is: plain numbers, the same in parts, and a pickle, which is read as data.
_WEIGHTS = (
    re.compile(r"model\.safetensors"),
    re.compile(r"model\.safetensors\.index\.json|model-\d+-of-\d+\.safetensors"),
    re.compile(r"pytorch_model\.bin"),
)


@dataclass(frozen=True, kw_only=True)
class HubFile:
    """One file of a repository.

    Attributes:
        name: In the repository's root.
        size_bytes: 0 where the hub does not say.
        sha256: Empty where the hub does not say (small files).
    """

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class HubFiles:
    """What an export needs of a repository.

    Attributes:
        repository: Such as ``bioptimus/H-optimus-0``.
        revision: The commit that the files are of.
        licence: As the repository's card names it; empty if it does not.
        files: Configuration first, then weights.
    """

    repository: str
    revision: str
    licence: str
    files: tuple[HubFile, ...]

    def __str__(self) -> str:
        """Such as ``config.json (1 kB) and model.safetensors (4.5 GB)``."""
        named = [f"{file.name} ({_size(file.size_bytes)})" for file in self.files]
        if len(named) > 4:
            whole = _size(sum(file.size_bytes for file in self.files))
            return f"{len(named)} files ({whole} in all)"
        return " and ".join(filter(None, [", ".join(named[:-1]), named[-1]]))


def list_files(repository: str) -> HubFiles:
    """Ask the hub for what an export would fetch; fetches none of it.

    Raises:
        CheckpointError: The hub's client is not installed, the hub cannot be reached, or the
            repository is not there, is closed to this user, or holds no weights.
    """
    try:
        from huggingface_hub import HfApi
    except ImportError as exc:
        raise CheckpointError(
            "downloading needs huggingface_hub; pip install 'bioptimus-wsi[export]'"
        ) from exc
    try:
        info: Any = HfApi().model_info(repository, files_metadata=True)
    except Exception as exc:  # the client raises errors of several libraries; this is its border
        raise _explained(repository, exc) from exc
    found = {file.name: file for file in map(_hub_file, info.siblings or ())}
    files = [found[name] for name in _CONFIGURATION if name in found]
    for pattern in _WEIGHTS:
        if weights := [file for name, file in sorted(found.items()) if pattern.fullmatch(name)]:
            break
    else:
        raise CheckpointError(
            f"{repository}: holds neither model.safetensors nor pytorch_model.bin"
        )
    card = info.card_data.to_dict() if info.card_data else {}
    return HubFiles(
        repository=repository,
        revision=info.sha,
        licence=str(card.get("license_name") or card.get("license") or ""),
        files=(*files, *weights),
    )


def download(wanted: HubFiles) -> Path:
    """Fetch the files into the hub's cache, or find them there, and check their digests.

    Returns:
        The folder that holds them.

    Raises:
        CheckpointError: A file cannot be fetched, or is not the one that the hub lists; such a
            file is removed.
    """
    from huggingface_hub import hf_hub_download

    paths = []
    for file in wanted.files:
        try:
            path = hf_hub_download(wanted.repository, file.name, revision=wanted.revision)
        except Exception as exc:  # the client raises errors of several libraries
            raise _explained(wanted.repository, exc, file=file.name) from exc
        paths.append(Path(path))
        _check(wanted.repository, file, paths[-1])
    return paths[0].parent


def _hub_file(sibling: Any) -> HubFile:
    lfs = sibling.lfs or {}
    return HubFile(
        name=sibling.rfilename, size_bytes=sibling.size or 0, sha256=lfs.get("sha256") or ""
    )


def _check(repository: str, file: HubFile, path: Path) -> None:
    # The client compares sizes only.
    if not file.sha256 or file_sha256(path) == file.sha256:
        return
    path.resolve().unlink()
    path.unlink(missing_ok=True)
    raise CheckpointError(
        f"{repository}: {file.name} arrived damaged (its sha256 is not the one that the hub lists) "
        "and was removed; run the command again"
    )


def _explained(repository: str, exc: Exception, *, file: str = "") -> CheckpointError:
    """The hub's errors in one line each, with what to do."""
    from huggingface_hub import constants, errors

    what = f"{repository}: {file}" if file else repository
    status = getattr(getattr(exc, "response", None), "status_code", None)
    # Above the next, which it is a kind of.
    if isinstance(exc, errors.GatedRepoError) or status == 403:
        words = (
            f"closed to you; ask for access at {constants.ENDPOINT}/{repository}, then log in "
            "with `hf auth login` or set HF_TOKEN"
        )
    elif isinstance(exc, errors.RepositoryNotFoundError):
        words = (
            f"not found at {constants.ENDPOINT}; if it is a private one, log in with "
            "`hf auth login` or set HF_TOKEN"
        )
    elif isinstance(exc, errors.OfflineModeIsEnabled):
        words = "not asked for, since HF_HUB_OFFLINE is set; give a local folder instead"
    else:
        # "Cannot be found in the cache" is what the client makes of many a failure.
        cause = exc.__cause__ if isinstance(exc, errors.LocalEntryNotFoundError) else None
        words = (
            f"cannot be downloaded from {constants.ENDPOINT}: {first_line(cause or exc)}; run it "
            "again, or give a local folder instead"
        )
    return CheckpointError(f"{what}: {words}")


def _size(count: int) -> str:
    if not count:
        return "size not known"
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} bytes"
