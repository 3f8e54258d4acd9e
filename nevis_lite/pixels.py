"""Decoding one image file, right for every kind that occurs in the published archives, and making images smaller."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

# Large images are made smaller roughly at first, as long as so many times their final size is left: JPEGs by their decoder,
# which then has half of the work, others by averages of blocks.
DRAFT, GAP = 1.25, 3


def read_image(source: bytes | str | Path) -> np.ndarray:
    """Decode one image file to uint8 (H, W, 3).

    Transparency is laid on white; 16-bit images are scaled, wider numbers and floats stretched from their lowest to their
    highest value; of an animation the first frame counts; EXIF rotation is ignored, as in the reference. OSError when the file
    is no image or broken.
    """
    with _opened(source) as image:
        return np.asarray(_plain(image).convert("RGB"))


def read_shrunk(source: bytes | str | Path, side: int) -> tuple[np.ndarray, int]:
    """An image file as `read_image` sees it, then as `shrink` leaves it, uint8 (H, W, 1 or 3); and its own shorter side."""
    with _opened(source) as image:
        shorter = min(image.size)
        drafted = image.draft(None, (int(DRAFT * side),) * 2) if side else None  # to a half, a quarter or an eighth
        return shrink(_plain(image), side, drafted and drafted[1]), shorter


def shrink(image, side: int, box: tuple[float, ...] | None = None) -> np.ndarray:
    """uint8 (H, W, 1 or 3) of an array (H, W), (H, W, 1) or (H, W, 3), or of a Pillow image, L or RGB.

    The shorter side is capped at `side`, unless that is 0; `box` is the part of a Pillow image that counts. An image without
    colours has one channel.
    """
    is_array = isinstance(image, np.ndarray)
    width, height = image.shape[1::-1] if is_array else box[2:] if box else image.size
    if side and min(width, height) > side:
        from PIL import Image

        if is_array:
            image = Image.fromarray(image.squeeze())
        scale = side / min(width, height)
        size = max(1, round(width * scale)), max(1, round(height * scale))
        image = image.resize(size, Image.Resampling.BILINEAR, box, reducing_gap=GAP)
    pixels = np.atleast_3d(np.asarray(image))
    if pixels.shape[2] == 3 and (pixels[..., 0] == pixels[..., 1]).all() and (pixels[..., 0] == pixels[..., 2]).all():
        pixels = pixels[..., :1]
    return np.ascontiguousarray(pixels)


@contextmanager
def _opened(source: bytes | str | Path) -> Iterator:
    """A file as a Pillow image that isn't decoded yet. Whatever goes wrong until it's closed is an OSError."""
    from PIL import Image, ImageFile, PngImagePlugin  # only those who decode files wait for it

    Image.MAX_IMAGE_PIXELS = None  # local files, shrunk at once
    PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY = 1 << 30  # long comments and colour profiles do no harm
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            yield image
    except Exception as error:  # its decoders say "broken" in many ways
        raise OSError(f"{type(error).__name__}: {error}") from None


def _plain(image):
    """Decode a Pillow image to one of mode L or RGB."""
    from PIL import Image

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
        return Image.fromarray(np.clip(np.round(values), 0, 255).astype(np.uint8))
    if mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image if image.mode in ("L", "RGB") else image.convert("L" if mode == "1" else "RGB")
