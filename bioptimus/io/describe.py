"""What ``bioptimus info`` tells about a slide, as plain JSON-ready values."""

from typing import Any

from bioptimus.io.wsi import Slide


def describe(slide: Slide) -> dict[str, Any]:
    """Everything known about a slide without reading its pixels.

    Args:
        slide: An open slide.

    Returns:
        Strings, numbers, lists and dictionaries; sizes are (width, height), positions level-0
        pixels, mpp in µm per level-0 pixel.
    """
    resolution = slide.resolution
    return {
        "path": str(slide.path),
        "name": slide.name,
        "vendor": slide.vendor,
        "reader": slide.reader,
        "dimensions": list(slide.dimensions),
        "levels": [
            {"dimensions": list(size), "downsample": list(downsample)}
            for size, downsample in zip(
                slide.level_dimensions, slide.level_downsamples, strict=True
            )
        ],
        "mpp": None if resolution.value is None else list(resolution.value),
        "mpp_source": resolution.source,
        "mpp_problem": resolution.problem or None,
        "mpp_candidates": [
            {
                "source": entry.source,
                "mpp": list(entry.mpp),
                "used": entry.used,
                "verdict": entry.verdict,
            }
            for entry in resolution.candidates
        ],
        "objective_power": slide.objective_power,
        "icc_profile": slide.has_icc,
        "icc_applied": slide.icc_applied,
        "background": list(slide.background),
        "bounds": None if slide.bounds is None else list(slide.bounds),
        "size_bytes": slide.size_bytes,
        "files": len(slide.size_files),
        "quickhash": slide.quickhash,
        "warnings": list(slide.warnings),
    }
