"""Small copies of the data sets whose files are arrays of pixels: see `published.py`."""

import gzip
import io
import pickle
import struct

import h5py
import numpy as np
import scipy.io
from published import bzipped, idx, picture, tarred, write, zipped

TRAIN, TEST = [(number, number * 3 % 5) for number in range(12)], [(number, number % 4) for number in range(20, 25)]
PUBLISHED = {"train": TRAIN, "test": TEST}


def pictures(rows: list, size: tuple, mode="L") -> np.ndarray:
    return np.stack([picture(number, size, mode) for number, _ in rows])


def ids(rows: list, first=0, kind=np.uint8) -> np.ndarray:
    return np.array([first + label for _, label in rows], kind)


def gzipped(content: bytes) -> bytes:
    return gzip.compress(content, mtime=0)


def landsat(folder):
    infrared = np.full((3, 3, 1), 77)
    for name, rows in (("sat.trn", TRAIN), ("sat.tst", TEST)):
        lines = [[*np.concatenate([picture(number, (3, 3)), infrared], 2).ravel(), label + 1] for number, label in rows]
        write(folder, {name: "".join(" ".join(map(str, line)) + "\n" for line in lines)})
    return PUBLISHED


def four_idx(prefix="", images=pictures, test="t10k") -> dict:
    return {f"{prefix}{part}-{kind}": idx(content)
            for part, rows in (("train", TRAIN), (test, TEST))
            for kind, content in (("images-idx3-ubyte.gz", images(rows, (28, 28))), ("labels-idx1-ubyte.gz", ids(rows)))}


def mnist(folder):
    write(folder, four_idx())
    return PUBLISHED


def emnist_balanced(folder):
    other = {f"gzip/emnist-{split}-{name}": b"" for split in ("byclass", "mnist")
             for name in ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz", "test-images-idx3-ubyte.gz")}
    inside = {**other, "gzip/emnist-balanced-mapping.txt": "0 48\n1 49\n", **four_idx("gzip/emnist-balanced-", test="test")}
    write(folder, {"gzip.zip": zipped(inside)})
    return PUBLISHED


def discs(rows: list, size: tuple) -> np.ndarray:
    """Pictures that keep their mean when they are rotated."""
    disc = np.hypot(*(np.indices(size) - (size[0] - 1) / 2)) < 12
    return np.stack([np.round(disc * (2 + 4 * number) * disc.size / disc.sum()) for number, _ in rows]).astype(np.uint8)


def mnist_rotation(folder):
    write(folder, four_idx(images=discs))
    return PUBLISHED


def smallnorb(folder):
    def matrix(array) -> bytes:
        dimensions = [*array.shape, 1, 1][:max(3, array.ndim)]
        magic = {1: 0x1E3D4C55, 4: 0x1E3D4C54}[array.itemsize]
        return gzipped(struct.pack(f"<Ii{len(dimensions)}i", magic, array.ndim, *dimensions) + array.tobytes())

    for part, rows in (("5x46789x9x18x6x2x96x96-training", TRAIN), ("5x01235x9x18x6x2x96x96-testing", TEST)):
        left, toys = pictures(rows, (96, 96)), np.resize([4, 6, 7, 8, 9], len(rows))
        write(folder, {f"smallnorb-{part}-dat.mat.gz": matrix(np.stack([left, 255 - left], 1)),
                       f"smallnorb-{part}-cat.mat.gz": matrix(ids(rows, kind=np.int32)),
                       f"smallnorb-{part}-info.mat.gz": matrix(np.stack([toys, toys, toys, toys], 1).astype(np.int32))})
    return {"train": [row for index, row in enumerate(TRAIN) if index % 5 > 1], "dev": TRAIN[::5], "dev_test": TRAIN[1::5],
            "test": TEST}


def planes(rows: list, side: int) -> np.ndarray:
    """(N, 3, side, side)"""
    return pictures(rows, (side, side), "RGB").transpose(0, 3, 1, 2)


class Python2Pickler(pickle._Pickler):
    """As Python 2 pickles: its strings are bytes."""

    def save_string(self, text: str | bytes):
        content = text.encode() if isinstance(text, str) else text
        self.write(pickle.BINSTRING + struct.pack("<i", len(content)) + content)

    dispatch = {**pickle._Pickler.dispatch, str: save_string, bytes: save_string}


def python2_pickle(batch: dict) -> bytes:
    file = io.BytesIO()
    Python2Pickler(file, protocol=2).dump(batch)
    return file.getvalue().replace(b"cnumpy._core.", b"cnumpy.core.")  # numpy's module of old


def cifar10(folder):
    parts = {"test_batch": TEST} | {f"data_batch_{part + 1}": TRAIN[3 * part:3 * part + 3] for part in range(4)}
    files = {name: python2_pickle({b"batch_label": name.encode(), b"data": planes(rows, 32).reshape(len(rows), -1),
                                   b"labels": ids(rows).tolist(), b"filenames": [b"a.png"] * len(rows)})
             for name, rows in parts.items()}
    files |= {"batches.meta": python2_pickle({b"label_names": [b"airplane"]}), "readme.html": "<html>"}
    write(folder, {"cifar-10-python.tar.gz": tarred({f"cifar-10-batches-py/{name}": files[name] for name in files}, "gz")})
    return PUBLISHED


def cifar100(folder):
    files = {"meta": b"", "file.txt~": b""}
    for name, rows in (("train", TRAIN), ("test", TEST)):
        files[name] = pickle.dumps({b"data": planes(rows, 32).reshape(len(rows), -1), b"fine_labels": ids(rows).tolist(),
                                    b"coarse_labels": [9] * len(rows)}, protocol=2)
    write(folder, {"cifar-100-python.tar.gz": tarred({f"cifar-100-python/{name}": files[name] for name in files}, "gz")})
    return PUBLISHED


def svhn(folder):
    for name, rows in (("train", TRAIN), ("test", TEST)):
        labels = [[label or 10] for _, label in rows]  # the digit 0 is called 10
        images = pictures(rows, (32, 32), "RGB").transpose(1, 2, 3, 0)
        scipy.io.savemat(folder / f"{name}_32x32.mat", {"X": images, "y": np.uint8(labels)}, do_compression=True)
    return PUBLISHED


def silhouettes_28(folder):
    variables, published = {}, PUBLISHED | {"dev_test": [(number, number % 3) for number in range(40, 44)]}
    for part, split in (("train", "train"), ("val", "dev_test"), ("test", "test")):
        rows = published[split]
        images = pictures(rows, (28, 28), "1") // 255
        variables |= {f"{part}_data": images.transpose(0, 2, 1).reshape(len(rows), 784),  # column by column
                      f"{part}_labels": ids(rows, 1)[:, None]}
    scipy.io.savemat(folder / "caltech101_silhouettes_28_split1.mat", variables)
    scipy.io.savemat(folder / "caltech101_silhouettes_28.mat", {"X": np.zeros((2, 784)), "Y": np.ones((1, 2))})
    return published


def usps(folder):
    for name, rows in (("usps.bz2", TRAIN), ("usps.t.bz2", TEST)):
        values = np.minimum((pictures(rows, (16, 16)).reshape(-1, 256) + 0.5) / 127.5 - 1, 1)
        lines = [" ".join([str(label + 1), *(f"{place + 1}:{value:.6g}" for place, value in enumerate(row))]) + " \n"
                 for row, (_, label) in zip(values, rows, strict=True)]
        write(folder, {name: bzipped("".join(lines))})
    return PUBLISHED


def semeion(folder):
    rows = [*TRAIN, *TEST]
    lines = [" ".join([*(f"{value:.4f}" for value in picture(number, (16, 16), "1").ravel() / 255),
                       *("1" if digit == label else "0" for digit in range(10))]) + " \n" for number, label in rows]
    write(folder, {"semeion.data": "".join(lines), "semeion.names": "1593 digits"})
    return {"train": rows}


def hdf5(**arrays) -> bytes:
    file = io.BytesIO()
    with h5py.File(file, "w") as content:
        for name, array in arrays.items():
            content.create_dataset(name, data=array)
    return file.getvalue()


def pacs(folder):
    domains = {"art_painting": [(0, 0), (1, 6), (2, 1), (3, 2)], "cartoon": [(4, 3), (5, 4), (6, 5), (7, 0)],
               "photo": [(8, 1), (9, 2), (8, 3), (10, 4)], "sketch": [(number, number % 7) for number in range(100, 112)]}
    for domain, rows in domains.items():
        for part, chosen in (("test", rows), ("train", rows[:2]), ("val", rows[2:])):
            images = pictures(chosen, (9, 9), "RGB")[..., ::-1]
            write(folder, {f"{domain}_{part}.hdf5": hdf5(images=images.astype(np.uint16), labels=ids(chosen, 1, np.uint16))})
    sources = domains["art_painting"] + domains["cartoon"] + domains["photo"]  # the same picture with two labels is no copy
    halves = [0, 0, 0, 0, 1, 0, 1, 0, 0, 1, 0, 0]
    sketches = list(zip(domains["sketch"], halves, strict=True))
    return {"train": sources[:7] + sources[9:], "dev": sources[7:9],
            "dev_test": [row for row, half in sketches if half == 0], "test": [row for row, half in sketches if half == 1]}


def stl10(folder):
    files = {"unlabeled_X.bin": b"\1" * 100, "fold_indices.txt": "0 1", "class_names.txt": "airplane"}
    for part, rows in (("train", TRAIN), ("test", TEST)):
        files |= {f"{part}_X.bin": planes(rows, 96).swapaxes(2, 3).tobytes(), f"{part}_y.bin": ids(rows, 1).tobytes()}
    write(folder, {"stl10_binary.tar.gz": tarred({f"stl10_binary/{name}": files[name] for name in files}, "gz")})
    return PUBLISHED


def path_mnist(folder):
    rows = [*TRAIN, *TEST]
    table = ",".join([*(f"pixel{place:04}" for place in range(2352)), "label"]) + "\n"
    table += "".join(",".join(map(str, [*picture(number, (28, 28)).ravel(), label + 1])) + "\n" for number, label in rows)
    tiles = "Kather_texture_2016_image_tiles_5000/Kather_texture_2016_image_tiles_5000"
    write(folder, {"colorectal-histology-mnist.zip": zipped({
        f"{tiles}/01_TUMOR/1_CRC_Row_1_Col_1.tif": b"", "hmnist_28_28_L.csv": "pixel0000,label\n7,1\n",
        "hmnist_28_28_RGB.csv": table, "hmnist_8_8_RGB.csv": "pixel0000,label\n7,1\n"})})
    return {"train": rows}


def patch_camelyon(folder):
    published = {"train": [(number, number // 3 % 2) for number in range(12)],
                 "dev_test": [(30, 1), (31, 0)], "test": [(41, 0), (42, 1), (43, 1)]}
    for part, split in (("train", "train"), ("valid", "dev_test"), ("test", "test")):
        rows, name = published[split], f"camelyonpatch_level_2_split_{part}"
        write(folder, {f"{name}_x.h5.gz": gzipped(hdf5(x=pictures(rows, (96, 96), "RGB"))),
                       f"{name}_y.h5.gz": gzipped(hdf5(y=ids(rows).reshape(-1, 1, 1, 1)))})
    return published


def casia_hwdb(folder):
    codes = [b"A\0", b"\xb0\xa1", b"\xb0\xb2", b"\xd7\xf9", b"\xff\xff"]  # in the order of their classes

    def gnt(rows: list) -> bytes:
        stream = b""
        for number, label in rows:
            width, height = 10 + number, 40 - number
            stream += struct.pack("<I2sHH", width * height + 10, codes[label], width, height)
            stream += (255 - picture(number, (width, height), "L")).tobytes()
        return stream

    files = {"TrainPart2": {"1200-c.gnt": TRAIN[8:]}, "TrainPart1": {"1002-c.gnt": TRAIN[5:8], "1001-c.gnt": TRAIN[:5]},
             "Test": {"1241-c.gnt": TEST, "readme.txt": []}}
    for part, members in files.items():
        write(folder, {f"Gnt1.1{part}.zip": zipped({name: gnt(rows) for name, rows in members.items()})})
    return PUBLISHED


LAYOUTS = {"landsat": landsat, "mnist": mnist, "fashion_mnist": mnist, "emnist_balanced": emnist_balanced,
           "mnist_rotation": mnist_rotation, "smallnorb": smallnorb, "cifar10": cifar10, "cifar100": cifar100, "svhn": svhn,
           "silhouettes_28": silhouettes_28, "usps": usps, "semeion": semeion, "pacs": pacs, "stl10": stl10,
           "path_mnist": path_mnist, "patch_camelyon": patch_camelyon, "casia_hwdb": casia_hwdb}
MODES = {"mnist": "L", "fashion_mnist": "L", "emnist_balanced": "L", "mnist_rotation": "L", "smallnorb": "L",
         "silhouettes_28": "1", "usps": "L", "semeion": "1", "casia_hwdb": "L"}
