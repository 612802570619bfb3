"""What several test files share: the slides, a model for runs, and a disk that is soon full."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bioptimus.tiles import TileSpec

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE_SLIDE = ROOT / "examples" / "CMU-1-Small-Region.svs"
SHARED_SLIDES = ROOT.parent / "shared" / "slides"


@pytest.fixture
def example_slide() -> Path:
    """A real H&E slide: Aperio, JPEG, 2220 x 2967 px, 0.499 µm/px, one level (CC0)."""
    return EXAMPLE_SLIDE


@pytest.fixture
def shared_slides() -> Path:
    """Folder of real and broken slides that may not be copied into this repository."""
    if not SHARED_SLIDES.is_dir():
        pytest.skip("needs the folder shared/slides beside the checkout")
    return SHARED_SLIDES


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``.pt2`` of a tiny model of 64-px tiles, to be left as it is."""
    # Here, since it loads torch, which few tests need.
    from tests.tiny_models import TINY, save_tiny

    spec = TINY.with_(tile=TileSpec(size_px=64))
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny.pt2", spec)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield folder
    # Lazily: markers of a cache stay open until this process ends.
    subprocess.run(["umount", "--lazy", str(folder)], check=True)
