"""Readers of published files that are arrays of pixels: IDX, MATLAB, HDF5, pickles, raw bytes, rows of text."""

from __future__ import annotations

import bz2
import gzip
import io
import pickle
import shutil
import struct
import tempfile
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from nevis_lite.config import UserError, need
from nevis_lite.raw import Raw
from nevis_lite.readers import Table, find

RECORD = struct.Struct("<IBBHH")  # before the pixels of a GNT file's character: size, two bytes of code, width, height
CHUNKS = 64 << 20  # bytes of unpacked chunks that HDF5 keeps, since images are read in their order


def unpacked(content: bytes, name: str) -> bytes:
    """A gzip or bzip2 file's content, told by its first bytes; other files as they are."""
    opener = {b"\x1f\x8b": gzip.decompress, b"BZ": bz2.decompress}.get(content[:2], bytes)
    try:
        return opener(content)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise UserError(f"{name}: cannot be decompressed ({error}); fetch it again") from None


def _table(images, labels, split: str, name: str) -> Table:
    """All images of one file or a pair of files, which belong to one split."""
    labels = np.ravel(labels).tolist()
    if len(images) != len(labels):
        raise UserError(f"{name}: has {len(images)} images but {len(labels)} labels")
    return Table(list(images), labels, [split] * len(labels))


def _of(variables, key: str | bytes, name: str):
    """An entry of a file of named arrays."""
    if key not in variables:
        raise UserError(f"{name}: has no variable {key}")
    return variables[key]


def _planes(values: np.ndarray, side: int, name: str) -> np.ndarray:
    """Images (N, side, side, 3) of rows that hold one colour after the other."""
    if values.size % (3 * side * side):
        raise UserError(f"{name}: does not hold whole images of {side} x {side} pixels; fetch it again")
    return values.reshape(-1, 3, side, side).transpose(0, 2, 3, 1)


# ---------------------------------------------------------------------------------------------------------------------
# IDX, and its relative NORB


def parse_idx(content: bytes, name: str) -> np.ndarray:
    """An IDX file of unsigned bytes or of 32-bit integers, gzipped or not."""
    content = unpacked(content, name)
    try:
        zero, kind, ndim = struct.unpack(">HBB", content[:4])
        shape = struct.unpack(f">{ndim}I", content[4:4 + 4 * ndim])
        if zero or kind not in (8, 12):
            raise ValueError("it holds neither unsigned bytes nor 32-bit integers")
        return np.frombuffer(content, ">u1" if kind == 8 else ">i4", offset=4 + 4 * ndim).reshape(shape)
    except (ValueError, struct.error) as error:
        raise UserError(f"{name}: not a whole IDX file ({error}); fetch it again") from None


def idx_in(raw: Raw, prefix: str = "", rotate: int | None = None) -> Table:
    """MNIST's four files, whose names begin with `prefix`, wherever they lie. `rotate` is the seed of random rotations."""
    table = Table()
    for split, part in (("train", "train"), ("test", "(test|t10k)")):
        names = [find(raw, rf"/{prefix}{part}-{kind}-ubyte(\.gz)?$")[0] for kind in ("images-idx3", "labels-idx1")]
        images, labels = (parse_idx(raw.read(name), name) for name in names)
        if rotate is not None:
            images = _rotated(images, np.random.default_rng([rotate, split == "test"]))
        table += _table(images, labels, split, names[0])
    return table


def _rotated(images: np.ndarray, random: np.random.Generator) -> list[np.ndarray]:
    """Each image turned by its own angle of whole degrees. The first n angles don't depend on how many images follow."""
    from PIL import Image

    angles = random.integers(360, size=len(images)).tolist()
    return [np.asarray(Image.fromarray(image).rotate(angle, Image.Resampling.BILINEAR))
            for image, angle in zip(images, angles, strict=True)]


def parse_norb(content: bytes, name: str) -> np.ndarray:
    """A "binary matrix" of NORB, gzipped or not: magic number, dimensions, values, all little-endian."""
    content = unpacked(content, name)
    try:
        magic, ndim = struct.unpack_from("<Ii", content)
        shape = struct.unpack_from(f"<{ndim}i", content, 8)
        kind = {0x1E3D4C55: np.dtype("u1"), 0x1E3D4C54: np.dtype("<i4")}[magic]
        return np.frombuffer(content, kind, offset=8 + 4 * max(3, ndim)).reshape(shape)  # three dimensions at least
    except (KeyError, ValueError, struct.error) as error:
        raise UserError(f"{name}: not a whole NORB matrix ({type(error).__name__}: {error}); fetch it again") from None


def smallnorb(raw: Raw) -> Table:
    """The left picture of each stereo pair; the published training images are split by the number of the toy."""
    table = Table()
    for part in ("training", "testing"):
        names = [find(raw, rf"/smallnorb-[\dx]+-{part}-{kind}\.mat(\.gz)?$")[0] for kind in ("dat", "cat", "info")]
        pairs, labels, info = (parse_norb(raw.read(name), name) for name in names)
        table += _table(pairs[:, 0].copy(), labels, "test", names[0])  # a copy, which doesn't keep the right pictures
        if part == "training":
            toys = {4: "dev", 6: "dev_test"}
            table.splits = [toys.get(toy, "train") for toy in info[:, 0].tolist()]
    return table


# ---------------------------------------------------------------------------------------------------------------------
# Pickles and raw bytes


def _latin1(text: str, encoding: str) -> bytes:
    """Stands for _codecs.encode, by which Python 3 pickles bytes for Python 2."""
    return text.encode("latin1")


def _blank(*_) -> np.ndarray:
    """Stands for numpy's _reconstruct: an array that the pickle then fills."""
    return np.empty(0)


class _Unpickler(pickle.Unpickler):
    """Plain containers, bytes and numpy arrays, nothing else: no other name in a file is so much as looked up."""

    KNOWN = {"numpy.ndarray": None, "numpy.dtype": np.dtype, "_codecs.encode": _latin1,
             "numpy.core.multiarray._reconstruct": _blank, "numpy._core.multiarray._reconstruct": _blank}

    def find_class(self, module: str, name: str):
        if f"{module}.{name}" not in self.KNOWN:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return self.KNOWN[f"{module}.{name}"]


def safe_pickle(content: bytes, name: str):
    """What a pickle of Python 2 or 3 holds. UserError when it's broken or wants more than containers and arrays."""
    try:
        return _Unpickler(io.BytesIO(content), encoding="bytes").load()
    except Exception as error:  # broken and hostile files say so in any way
        raise UserError(f"{name}: not a pickle of arrays ({type(error).__name__}: {error}); fetch it again") from None


def cifar(raw: Raw, labels: str, label_bytes: int) -> Table:
    """CIFAR for Python: pickles with `data` and `labels`; or else its binary version, the last of `label_bytes` counts."""
    table = Table()
    names = find(raw, r"/cifar-100?-[\w-]+/(data_batch_\d|train|test(_batch)?)(\.bin)?$")
    for name in [name for name in names if not name.endswith(".bin")] or names:
        split = "test" if "/test" in name else "train"
        content = raw.read(name)
        if name.endswith(".bin"):
            if len(content) % (label_bytes + 3072):
                raise UserError(f"{name}: does not hold whole records; fetch it again")
            rows = np.frombuffer(content, np.uint8).reshape(-1, label_bytes + 3072)
            pixels, ids = rows[:, label_bytes:], rows[:, label_bytes - 1]
        else:
            batch = safe_pickle(content, name)
            pixels, ids = (np.asarray(_of(batch, key.encode(), name), np.uint8) for key in ("data", labels))
        table += _table(_planes(pixels, 32, name), ids, split, name)
    return table


def stl10(raw: Raw) -> Table:
    """Raw bytes, each colour of an image column by column."""
    table = Table()
    for split in ("train", "test"):
        names = [find(raw, rf"/{split}_{kind}\.bin$")[0] for kind in "Xy"]
        pixels, labels = (np.frombuffer(raw.read(name), np.uint8) for name in names)
        table += _table(_planes(pixels, 96, names[0]).swapaxes(1, 2), labels, split, names[0])
    return table


@dataclass(frozen=True, slots=True)
class Character:
    """A reference to a record of a GNT file, which `read` gives."""

    read: Callable[[str], bytes]
    name: str
    offset: int

    def load(self) -> np.ndarray:
        content = self.read(self.name)
        *_, width, height = RECORD.unpack_from(content, self.offset)
        pixels = np.frombuffer(content, np.uint8, width * height, self.offset + RECORD.size)
        return 255 - pixels.reshape(height, width)  # ink is bright

    def __str__(self):
        return f"{self.name} at {self.offset}"


def casia_hwdb(raw: Raw) -> Table:
    """GNT files, one a writer: millions of characters, so references. Labels are their two-byte codes."""
    table, read = Table(), _keeping(raw.read)
    for name in find(raw, r"(?i)\.gnt$"):
        content, offset = raw.read(name), 0
        while offset < len(content):
            try:
                _, first, second, width, height = RECORD.unpack_from(content, offset)
            except struct.error:
                width = height = 0
            end = offset + RECORD.size + width * height
            if not width * height or end > len(content):
                raise UserError(f"{name}: is damaged at byte {offset}; fetch it again")
            table.add(Character(read, name, offset), first << 8 | second, "test" if "test" in name.lower() else "train")
            offset = end
    return table


def _keeping(read: Callable[[str], bytes]) -> Callable[[str], bytes]:
    """`read`, keeping the last few files for images that are loaded in their order; threads wait for each other's."""
    kept, lock = lru_cache(maxsize=4)(read), threading.Lock()

    def locked(name: str) -> bytes:
        with lock:
            return kept(name)

    return locked


# ---------------------------------------------------------------------------------------------------------------------
# Rows of text


def _numbers(raw: Raw, name: str, columns: int, **options) -> np.ndarray:
    """(N, columns) numbers of a text file; `options` of np.loadtxt."""
    try:
        values = np.loadtxt(io.BytesIO(raw.read(name)), ndmin=2, **options)
        if values.shape[1] != columns:
            raise ValueError(f"they have {values.shape[1]}")
        return values
    except ValueError as error:
        raise UserError(f"{name}: cannot be read as rows of {columns} numbers ({error})") from None


def semeion(raw: Raw) -> Table:
    """16 x 16 zeros and ones, and ten more that tell the digit."""
    name = find(raw, r"/semeion\.data$")[0]
    rows = _numbers(raw, name, 266).astype(np.uint8)
    return _table(rows[:, :256].reshape(-1, 16, 16) * 255, rows[:, 256:].argmax(1), "train", name)


def path_mnist(raw: Raw) -> Table:
    """28 x 28 x 3 bytes and the label, below a header."""
    name = find(raw, r"/hmnist_28_28_RGB\.csv$")[0]
    rows = _numbers(raw, name, 2353, dtype=np.uint8, delimiter=",", skiprows=1)
    return _table(rows[:, :-1].reshape(-1, 28, 28, 3), rows[:, -1], "train", name)


def usps(raw: Raw) -> Table:
    """LIBSVM's rows: the label, then place:value for 16 x 16 pixels from -1 to 1; places that are left out are 0."""
    table = Table()
    for split, pattern in (("train", r"/usps(\.bz2)?$"), ("test", r"/usps\.t(\.bz2)?$")):
        name = find(raw, pattern)[0]
        lines = [line.split() for line in unpacked(raw.read(name), name).decode("latin-1").splitlines() if line.strip()]
        values = np.zeros((len(lines), 256))
        try:
            for row, (_, *pairs) in zip(values, lines, strict=True):
                for place, value in (pair.split(":") for pair in pairs):
                    row[int(place) - 1] = float(value)
        except (ValueError, IndexError) as error:
            raise UserError(f"{name}: cannot be read as rows of a label and place:value ({error})") from None
        pixels = ((values + 1) / 2 * 255).astype(np.uint8).reshape(-1, 16, 16)
        table += _table(pixels, [fields[0] for fields in lines], split, name)
    return table


# ---------------------------------------------------------------------------------------------------------------------
# MATLAB and HDF5


def read_mat(raw: Raw, name: str) -> dict[str, np.ndarray]:
    """The variables of a MATLAB file as `scipy.io.loadmat` gives them, also those of version 7.3, which is HDF5.

    Numbers are arrays in MATLAB's own axes, words arrays (1,) of strings, cells arrays of objects, and a structure is a
    record array (1, 1). UserError when the file is damaged or a library is missing.
    """
    content = raw.read(name)
    is_hdf5 = content[512:520] == b"\x89HDF\r\n\x1a\n"
    module = need("h5py", "h5py", name) if is_hdf5 else need("scipy.io", "SciPy", name)
    try:
        if is_hdf5:
            with module.File(io.BytesIO(content), "r") as file:
                return {key: _mat73(file, file[key]) for key in file if not key.startswith("#")}
        return {key: value for key, value in module.loadmat(io.BytesIO(content)).items() if not key.startswith("__")}
    except Exception as error:  # their parsers say "broken" in many ways
        raise UserError(f"{name}: not a whole MATLAB file ({type(error).__name__}: {error}); fetch it again") from None


def _mat73(file, node) -> np.ndarray:
    """A node of a MATLAB 7.3 file, whose axes lie the other way round."""
    if hasattr(node, "keys"):
        return np.array([[tuple(_mat73(file, node[key]) for key in node)]], [(key, object) for key in node])
    if "MATLAB_empty" in node.attrs:
        return np.empty(0)
    values = node[()].T
    if node.attrs.get("MATLAB_class") == b"char":
        return np.array(["".join(chr(code) for code in row) for row in values])
    if values.dtype == object:
        cells = np.empty(values.shape, object)
        for place, reference in np.ndenumerate(values):
            cells[place] = _mat73(file, file[reference])
        return cells
    return values


def svhn(raw: Raw) -> Table:
    """X (32, 32, 3, N) and y from 1 to 10, where 10 stands for the digit 0."""
    table = Table()
    for split in ("train", "test"):
        name = find(raw, rf"/{split}_32x32\.mat$")[0]
        variables = read_mat(raw, name)
        table += _table(np.moveaxis(_of(variables, "X", name), 3, 0), _of(variables, "y", name) % 10, split, name)
    return table


def silhouettes(raw: Raw) -> Table:
    """Rows of zeros and ones, each an image of 28 x 28 column by column."""
    table, name = Table(), find(raw, r"/caltech101_silhouettes_28_split1\.mat$")[0]
    variables = read_mat(raw, name)
    for part, split in (("train", "train"), ("val", "dev_test"), ("test", "test")):
        pixels = _of(variables, f"{part}_data", name).astype(np.uint8) * 255
        table += _table(pixels.reshape(-1, 28, 28).swapaxes(1, 2), _of(variables, f"{part}_labels", name), split, name)
    return table


@dataclass(frozen=True, slots=True)
class Row:
    """A reference to an image in an HDF5 file, whose library lets one thread read at a time."""

    images: object  # h5py.Dataset (N, H, W, 3)
    index: int
    name: str
    step: int  # of the channels: -1 turns BGR to RGB

    def load(self) -> np.ndarray:
        return self.images[self.index][..., ::self.step].astype(np.uint8)

    def __str__(self):
        return f"{self.name}, image {self.index}"


def _hdf5(raw: Raw, name: str):
    """An open h5py.File of the folder; a gzipped one is first unpacked on disk, since images are read one by one."""
    h5py, path = need("h5py", "h5py", name), raw.folder / name
    try:
        if not name.endswith(".gz"):
            return h5py.File(path, "r", rdcc_nbytes=CHUNKS)
        with tempfile.NamedTemporaryFile(prefix="nevis_lite-") as plain, gzip.open(path) as packed:
            shutil.copyfileobj(packed, plain, 1 << 22)
            plain.flush()
            return h5py.File(plain.name, "r", rdcc_nbytes=CHUNKS)  # it outlives its name for as long as it's open
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{name}: cannot be read as HDF5 ({error}); fetch it again, or free space in "
                        f"{tempfile.gettempdir()}") from None


def _stored(images, labels, split: str, name: str, step: int = 1) -> Table:
    return _table([Row(images, index, name, step) for index in range(len(images))], labels, split, name)


def pacs(raw: Raw) -> Table:
    """Twelve files, `images` in BGR; those of three domains are train, the sketches test, whatever the names say."""
    table = Table()
    for name in find(raw, r"/(art_painting|cartoon|photo|sketch)_(train|val|test)\.hdf5$"):
        file, split = _hdf5(raw, name), "test" if "sketch_" in name else "train"
        table += _stored(_of(file, "images", name), _of(file, "labels", name), split, name, step=-1)
    return table


def patch_camelyon(raw: Raw) -> Table:
    """`x` (N, 96, 96, 3) and `y` (N, 1, 1, 1) in files of their own."""
    table = Table()
    for part, split in (("train", "train"), ("valid", "dev_test"), ("test", "test")):
        x, y = (find(raw, rf"/camelyonpatch_level_2_split_{part}_{kind}\.h5(\.gz)?$")[0] for kind in "xy")
        table += _stored(_of(_hdf5(raw, x), "x", x), _of(_hdf5(raw, y), "y", y), split, x)
    return table


READERS = {"idx_in": idx_in, "smallnorb": smallnorb, "cifar": cifar, "stl10": stl10, "casia_hwdb": casia_hwdb,
           "semeion": semeion, "path_mnist": path_mnist, "usps": usps, "svhn": svhn, "silhouettes": silhouettes,
           "pacs": pacs, "patch_camelyon": patch_camelyon}
