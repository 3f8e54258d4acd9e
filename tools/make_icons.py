r"""Build a large data set of icons, IDX files of about 1,000 classes, from the icon sets of the npm package @iconify/json.

    python3 -m venv VENV
    VENV/bin/pip install numpy==2.4.6 pillow==13.0.0 resvg-py==0.5.0
    VENV/bin/python tools/make_icons.py --work DIR           # writes data/icons

The package (about 100 MB) is fetched into DIR, once, by npm pack; nothing is installed. A class is a concept: what the name of
an icon says without the words for how it is drawn. Its images are the drawings of it in many sets. Sets whose licence restricts
what may be done with them, or is unknown, are left out, and ATTRIBUTION.md names the others. docs/fluid.md says more.
"""

import argparse
import collections
import gzip
import hashlib
import importlib.metadata
import io
import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
from PIL import Image

PYPI = {"numpy": "2.4.6", "pillow": "13.0.0", "resvg-py": "0.5.0"}
ICONIFY = "@iconify/json"
NPM = {ICONIFY: "2.2.535"}
LICENCES = {  # SPDX name: where its text is
    "MIT": "https://spdx.org/licenses/MIT.html",
    "Apache-2.0": "https://www.apache.org/licenses/LICENSE-2.0",
    "CC0-1.0": "https://creativecommons.org/publicdomain/zero/1.0/",
    "CC-BY-3.0": "https://creativecommons.org/licenses/by/3.0/",
    "CC-BY-4.0": "https://creativecommons.org/licenses/by/4.0/",
    "ISC": "https://spdx.org/licenses/ISC.html",
    "Unlicense": "https://unlicense.org/"}
# Words of an icon's name that say how it is drawn, not what it shows; numbers (sizes, variants) go as well.
STYLE_WORDS = set(
    "fill filled outline outlined line linear light thin bold regular solid duotone duo twotone two tone sharp round "
    "rounded alt broken bulk variant big small large mini micro sm md lg xs xl medium s m l icon color colored flat "
    "straight fat".split())


def run(*command, cwd):
    subprocess.run(command, cwd=cwd, check=True, stdout=subprocess.DEVNULL)


def fetch(work, npm, debian=()):
    """Download and unpack the pinned packages, {name: version}, under `work`; return {package: folder}."""
    folders = {}
    for name, version in {**dict(debian), **npm}.items():
        folder = folders[name] = work / "packages" / f"{name.strip('@').replace('/', '-')}-{version}"
        if folder.exists():
            continue
        # A fresh folder a package: its one file is then known without guessing how the downloader spells the name.
        download, partial = work / "download", folder.with_name("partial")
        for path in (download, partial):
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True)
        if name in npm:
            run("npm", "pack", "--silent", f"{name}@{version}", cwd=download)
            run("tar", "xzf", *download.iterdir(), "-C", partial, cwd=work)
        else:
            run("apt-get", "download", f"{name}={version}", cwd=download)
            run("dpkg-deb", "-x", *download.iterdir(), partial, cwd=work)
        partial.rename(folder)
    return folders


def print_versions(pypi, *others):
    for name, version in pypi.items():
        found = importlib.metadata.version(name)
        print(f"{name} {found}" + ("" if found == version else f" (made with {version}: the bytes may differ)"))
    print(*(f"{name} {version}" for other in others for name, version in other.items()), sep="\n")


def allowed(info):
    """Whether a set may be used: its licence is known and free, and it has no colours of its own (dark on white is common)."""
    return info.get("license", {}).get("spdx") in LICENCES and not info.get("palette")


def concept_of(name):
    """What an icon shows: its name without words of style and numbers."""
    return "-".join(t for t in name.split("-") if t not in STYLE_WORDS and not re.fullmatch(r"\d+(px|x\d+)?", t))


def read_icons(folders):
    """Names and drawings by concept and set, {concept: {set: {name: (body, left, top, width, height)}}}."""
    package = folders[ICONIFY] / "package"
    concepts = collections.defaultdict(lambda: collections.defaultdict(dict))
    collection = json.loads((package / "collections.json").read_text())
    for prefix in sorted(prefix for prefix, info in collection.items() if allowed(info)):
        data = json.loads((package / "json" / f"{prefix}.json").read_text())
        for name, icon in sorted(data["icons"].items()):
            unusual = icon.keys() & {"hidden", "rotate", "hFlip", "vFlip"}
            if unusual or re.search("<(animate|set|text|image)", icon["body"]):
                continue
            box = [icon.get(k, data.get(k, d)) for k, d in (("left", 0), ("top", 0), ("width", 16), ("height", 16))]
            concepts[concept_of(name)][prefix][name] = (icon["body"], *box)
    return concepts, collection


def most_drawn(concepts, classes):
    """The concepts with the most different drawings, {concept: [(set, name, drawing), ...]}, from most to fewest.

    A drawing that several icons share counts once, for the first of them in the order of concept, set and name.
    """
    seen, found = set(), {}
    for concept in sorted(concepts.keys() - {""}):  # nothing is left of names that only say how it is drawn
        found[concept] = []
        for prefix, drawings in sorted(concepts[concept].items()):
            for name, drawing in sorted(drawings.items()):
                if drawing[0] not in seen:
                    seen.add(drawing[0])
                    found[concept].append((prefix, name, drawing))
    order = sorted(found, key=lambda concept: (-len(found[concept]), concept))
    return {concept: found[concept] for concept in order[:classes]}


def render(body, left, top, width, height):
    """A 32x32 grey image, black on white, the drawing centred; None where next to nothing is drawn."""
    import resvg_py  # nothing else needs it

    side = max(width, height)
    view = f"{left - (side - width) / 2} {top - (side - height) / 2} {side} {side}"
    svg = (f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" width="32" height="32" '
           f'viewBox="{view}" color="#000">{body}</svg>')
    png = resvg_py.svg_to_bytes(svg_string=svg, background="#ffffff", skip_system_fonts=True)
    image = np.asarray(Image.open(io.BytesIO(png)).convert("L"))
    return image if image.min() < 128 and image.mean() < 252 and image.max() > 128 else None


def render_new(drawing, seen):
    """The rendered drawing, or None where it is empty or its pixels were seen before; remembers what it returns."""
    image = render(*drawing)
    if image is None or image.tobytes() in seen:
        return None
    seen.add(image.tobytes())
    return image


def write_idx(folder, name, array):
    """An IDX file of an array of bytes, or of 32-bit integers where its values need them."""
    code, kind, ending = (8, "u1", "ubyte") if array.max() < 256 else (12, ">i4", "int")
    header = bytes((0, 0, code, array.ndim)) + np.array(array.shape, ">u4").tobytes()
    path = folder / f"{name}-idx{array.ndim}-{ending}.gz"
    path.write_bytes(gzip.compress(header + np.ascontiguousarray(array, kind).tobytes(), compresslevel=9, mtime=0))


def attribution(used, collection):
    """Lines of a table of the icon sets, {set: number of images}."""
    lines = ["| icon set | name | author | licence | images |", "|---|---|---|---|---|"]
    for prefix in sorted(used):
        info = collection[prefix]
        author, licence = info["author"], info["license"]
        by = f"[{author['name']}]({author['url']})" if author.get("url") else author["name"]
        terms = f"[{licence['spdx']}]({licence['url']})" if licence.get("url") else licence["spdx"]
        lines.append(f"| {prefix} | {info['name'].replace('|', '/')} | {by} | {terms} | {used[prefix]} |")
    return lines


def checksums(out):
    """Lines in the format of sha256sum for every file below `out` but the list itself."""
    paths = sorted(path.relative_to(out).as_posix() for path in out.rglob("*")
                   if path.is_file() and path.name != "SHA256SUMS")
    return "".join(f"{hashlib.sha256((out / path).read_bytes()).hexdigest()}  {path}\n" for path in paths)


def build(out, folders, classes):
    """Write the data set; return the number of images of each class."""
    concepts, collection = read_icons(folders)
    images, labels, sources, seen = [], [], [], set()
    chosen = most_drawn(concepts, classes)
    for label, drawings in enumerate(chosen.values()):
        for prefix, name, drawing in drawings:
            image = render_new(drawing, seen)
            if image is not None:
                images.append(image)
                labels.append(label)
                sources.append(f"{prefix}:{name}")
    write_idx(out, "train-images", np.stack(images))
    write_idx(out, "train-labels", np.array(labels))
    (out / "classes.txt").write_text("\n".join(chosen) + "\n")
    (out / "sources.txt").write_text("\n".join(sources) + "\n")
    used = collections.Counter(source.split(":")[0] for source in sources)
    (out / "ATTRIBUTION.md").write_text("\n".join([
        "# Attribution", "",
        f"The images are changed copies, rendered to 32x32 grey pixels, of the icon sets below, through {ICONIFY} "
        f"{NPM[ICONIFY]}. Each keeps its licence; sources.txt names the icon of each image.", "",
        *attribution(used, collection), "", *(f"- {name}: {url}" for name, url in LICENCES.items())]) + "\n")
    (out / "SHA256SUMS").write_text(checksums(out))
    return np.bincount(labels)


def main():
    parser = argparse.ArgumentParser(description="Build a large data set of icons.")
    parser.add_argument("--work", type=Path, required=True, help="folder for the downloaded package")
    parser.add_argument("--out", type=Path, default=Path("data/icons"))
    parser.add_argument("--classes", type=int, default=1000)
    options = parser.parse_args()
    print_versions(PYPI, NPM)
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    options.out.mkdir(parents=True, exist_ok=True)
    counts = build(options.out, fetch(work, NPM), options.classes)
    print(f"{counts.sum():,} images of {len(counts):,} classes, {counts.min()} to {counts.max()} a class, median "
          f"{np.median(counts):g}, in {options.out}")
    print(f"SHA256SUMS has the hash {hashlib.sha256((options.out / 'SHA256SUMS').read_bytes()).hexdigest()[:12]}")


if __name__ == "__main__":
    main()
