"""Decoding one image file, right for every kind that occurs in the published archives."""

from __future__ import annotations

import io
import math
from pathlib import Path

import numpy as np


def read_image(source: bytes | str | Path) -> np.ndarray:
    """Decode one image file to uint8 (H, W, 3).

    Transparency is laid on white; 16-bit images are scaled, wider numbers and floats stretched from their lowest to their
    highest value; of an animation the first frame counts; EXIF rotation is ignored, as in the reference. OSError when the file
    is no image or broken.
    """
    from PIL import Image, ImageFile, PngImagePlugin  # only those who decode files wait for it

    Image.MAX_IMAGE_PIXELS = None  # local files, shrunk at once
    PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY = 1 << 30  # long comments and colour profiles do no harm
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            image.load()
            mode = image.mode
            if mode.startswith("I;16") or mode in ("I", "F"):
                values = np.asarray(image).astype(np.float64)
                low, high = float(values.min()), float(values.max())
                if not math.isfinite(high - low):
                    raise ValueError("values that are not finite")
                if mode != "F" and 0 <= low and high <= 65535:  # 16 bits, also where Pillow keeps them in a wider mode
                    values = values / 257
                else:
                    values = (values - low) * (255 / max(high - low, 1e-12))
                return np.repeat(np.clip(np.round(values), 0, 255).astype(np.uint8)[..., None], 3, axis=2)
            if mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
                image = image.convert("RGBA")
                image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
            return np.asarray(image.convert("RGB"))
    except Exception as error:  # its decoders say "broken" in many ways
        raise OSError(f"{type(error).__name__}: {error}") from None
