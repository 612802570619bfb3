"""Embedded colour profiles: from the scanner's colours to sRGB, when asked for."""

import io
import threading

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageCms

from bioptimus.errors import SlideOpenError

Pixels = npt.NDArray[np.uint8]


class SrgbTransform:
    """Converts RGB pixels from one profile to sRGB.

    Args:
        profile: The embedded ICC profile.
        name: The slide's name, for the message.

    Raises:
        SlideOpenError: The profile cannot be used.
    """

    def __init__(self, profile: bytes, name: str) -> None:
        self._profile = profile
        # Little CMS keeps a cache inside a transform, so each thread gets its own.
        self._per_thread = threading.local()
        try:
            self._per_thread.transform = self._build()
        except (ImageCms.PyCMSError, OSError, ValueError) as exc:
            raise SlideOpenError(
                f"{name}: its colour profile cannot be used ({exc}); leave out --icc srgb"
            ) from exc

    def _build(self) -> ImageCms.ImageCmsTransform:
        source = ImageCms.ImageCmsProfile(io.BytesIO(self._profile))
        return ImageCms.buildTransform(
            source,
            ImageCms.createProfile("sRGB"),
            "RGB",
            "RGB",
            renderingIntent=ImageCms.Intent(ImageCms.getDefaultIntent(source)),
        )

    def __call__(self, pixels: Pixels) -> Pixels:
        """RGB (H, W, 3) in sRGB."""
        transform = getattr(self._per_thread, "transform", None)
        if transform is None:
            transform = self._per_thread.transform = self._build()
        image = Image.fromarray(np.ascontiguousarray(pixels))
        converted = ImageCms.applyTransform(image, transform)
        return np.asarray(converted, dtype=np.uint8)
