"""What several test files share: the slides."""

from pathlib import Path

import pytest

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
