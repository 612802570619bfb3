"""Coarse image of a slide → mask of its tissue → share of tissue in each tile.

Everything here works on arrays and on files of masks; it knows neither OpenSlide nor models.
"""

from bioptimus.tissue.contour import outline, polygons
from bioptimus.tissue.find import SEARCH_VERSION, find_tissue
from bioptimus.tissue.load import load_mask
from bioptimus.tissue.mask import TissueMask, TissueOptions, TissueStep, full_mask
from bioptimus.tissue.ratios import tissue_ratios

__all__ = [
    "SEARCH_VERSION",
    "TissueMask",
    "TissueOptions",
    "TissueStep",
    "find_tissue",
    "full_mask",
    "load_mask",
    "outline",
    "polygons",
    "tissue_ratios",
]
