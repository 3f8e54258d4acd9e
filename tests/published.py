"""Tools for small faithful copies of published data sets: pictures that tell their number, and archives made of them.

A layout is a function `layout(folder)` that writes a data set's files, with the published names and formats and a few stray
files, and returns what a right reader finds: {published split: [(number, label), ...]} in the order of the images. `LAYOUTS` of
each `published_*.py` names them by the key of the data set. Where a data set has its own split rule, the layout returns the
final splits, worked out by hand.
"""

import bz2
import gzip
import io
import struct
import tarfile
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image

LEVELS = 6  # of a colour channel, 40 apart: JPEG does not confuse them


def picture(number: int, size=(12, 9), mode="RGB") -> np.ndarray:
    """(H, W) or (H, W, 3) uint8 of one colour that tells `number`: below 216 in RGB, below 64 in L, below 2 ** W in 1."""
    width, height = size
    if mode == "RGB":
        colour = [20 + 40 * (number // LEVELS ** power % LEVELS) for power in range(3)]
        return np.full((height, width, 3), colour, np.uint8)
    if mode == "L":
        return np.full((height, width), 2 + 4 * number, np.uint8)
    columns = np.array([255 * (number >> place & 1) for place in range(width)], np.uint8)  # mode 1: binary digits
    return np.tile(columns, (height, 1))


def number_of(pixels: np.ndarray, mode="RGB") -> int:
    """The inverse of `picture`, within what lossy formats change. Reads any corner-to-corner crop of the picture."""
    pixels = pixels if pixels.ndim == 3 else pixels[..., None]
    if mode == "RGB":
        colour = np.broadcast_to(pixels.reshape(-1, pixels.shape[2]).mean(0), 3)
        return int(sum(round((value - 20) / 40) * LEVELS ** power for power, value in enumerate(colour)))
    if mode == "L":
        return round((pixels.mean() - 2) / 4)
    return int(sum(1 << place for place, value in enumerate(pixels[..., 0].mean(0)) if value > 127))


def encode(number: int, kind="PNG", size=(12, 9), mode="RGB") -> bytes:
    """`picture` as a file: PNG, JPEG, BMP, PPM (also PGM), GIF or TIFF."""
    return encoded(picture(number, size, mode), kind)


def encoded(pixels: np.ndarray, kind="PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **({"quality": 95} if kind == "JPEG" else {}))
    return file.getvalue()


def _bytes(content) -> bytes:
    return content.encode("utf-8") if isinstance(content, str) else content


def write(folder: Path, files: dict):
    """{name: bytes or text} as files of the folder."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(_bytes(content))


def zipped(members: dict) -> bytes:
    """{member name: bytes or text} as a zip, in the order of the dict."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, _bytes(content))
    return file.getvalue()


def tarred(members: dict, compression="", links: dict | None = None) -> bytes:
    """{member name: bytes or text} as a tar, `compression` gz, bz2 or none; `links` {name: target} are symbolic links."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=f"w:{compression}") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(_bytes(content))
            archive.addfile(member, io.BytesIO(_bytes(content)))
        for name, target in (links or {}).items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, target
            archive.addfile(member)
    return file.getvalue()


def idx(array) -> bytes:
    """An array of bytes in the IDX format, gzipped."""
    array = np.asarray(array, np.uint8)
    return gzip.compress(struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes(), mtime=0)


def bzipped(text: str) -> bytes:
    return bz2.compress(text.encode())
