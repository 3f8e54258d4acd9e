"""Write docs/data.md, a row for each data set of the FULL stream, from the catalogue.

Usage: PYTHONPATH=. python tools/make_data_table.py
"""

from collections import defaultdict
from pathlib import Path

from nevis_lite import datasets, fetch, stream
from nevis_lite.datasets import DataSet

PAGE = Path(__file__).resolve().parent.parent / "docs" / "data.md"
HEAD = """# The data sets of FULL and SHORT

97 data sets make the 106 tasks. `python -m nevis_lite.stream prepare full` fetches what a plain address gives, says for each
other file what to do by hand, and builds the pixel caches; `check full` shows what is there. This page is written by
`tools/make_data_table.py` from `nevis_lite/datasets.yaml`, which has all file names, addresses, checksums and reading rules.

**Read this before you trust a row.** Only Landsat, Fashion-MNIST and MNIST's digits were read from real published files. For
all others the reader was tested on a small copy of the published layout, made from public descriptions; a file that differs
from them shows up as an error that names it, or as a wrong number of images, which `check` reports. Addresses and checksums
are those that other public catalogues state; none of the downloads could be tried when this was written.

**Images** are those of train / dev / dev_test / test, computed from the numbers that the publishers state and our rules for the
splits. They are rounded, and marked with "about", where the publishers' numbers are vague, or where it's only known in the
files how many are dropped: exact copies, small boxes. **Size** is that of the files to fetch, as other catalogues or the
publishers state it, rounded. **Licences** and terms are given as far as we know them, shortened, and may have changed; read
them at the source before you use a data set. "None stated" means that the publishers' pages state none, which is no permission.

Order of images, and with it the random splits, is that of sorted file names (see [differences](differences.md)).

"""
COLUMNS = ("years in FULL", "data set", "kind", "classes", "images", "files", "size", "licence or terms", "how to get them",
           "read from real files", "notes")
REAL = {"landsat": "yes", "fashion_mnist": "yes", "mnist": "10,000 digits, as IDX"}


def page() -> str:
    years = defaultdict(list)
    for entry in stream.named_streams()["full"]:
        years[entry["task"]].append(str(entry["year"]))
    catalogue = datasets.catalogue(Path("data"))
    rows = [cells(catalogue[key], ", ".join(listed)) for key, listed in years.items()]
    return HEAD + "".join(line(row) for row in (COLUMNS, ["---"] * len(COLUMNS), *rows))


def cells(dataset: DataSet, years: str) -> tuple[str, ...]:
    images = " / ".join(f"{dataset.images[name]:,}" for name in datasets.SPLITS) if dataset.images else "not known"
    by_hand = list(dict.fromkeys(file["manual"] for file in dataset.files if fetch.is_manual(file)))
    return (years, f"{dataset.name} (`{dataset.key}`)", dataset.kind.replace("_", " "), f"{dataset.classes}",
            f"about {images}" if dataset.images_about else images,
            fetch.few([file for file in dataset.files if "instead_of" not in file]),
            dataset.size or "not known", dataset.licence or "not known",
            "by hand: " + " / ".join(by_hand) if by_hand else "fetched", REAL.get(dataset.key, "no"), dataset.note)


def line(row) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ").strip() for cell in row) + " |\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
