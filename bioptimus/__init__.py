"""Whole-slide images to embeddings and predictions.

An independent implementation, not affiliated with Bioptimus. Importing this package loads
neither torch nor OpenSlide nor HDF5; its parts load what they need when they are used.
"""

__version__ = "0.1.0"
