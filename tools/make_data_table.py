"""Write docs/datasets.md, a row for each data set of the FULL stream, from the catalogue: `python tools/make_data_table.py`."""

from collections import defaultdict
from pathlib import Path

from nevis_lite import datasets, fetch, stream

HEAD = """# The data sets of FULL and SHORT

97 data sets make the 106 tasks. `python -m nevis_lite.stream prepare full` fetches what a plain address gives, says for each
other file what to do by hand, and builds the pixel caches; `check full` shows what is there. This page is written by
`tools/make_data_table.py` from `nevis_lite/datasets.yaml`, which has all file names, addresses, checksums and reading rules.

**Read this before you trust a row.** Only Landsat, Fashion-MNIST and MNIST's digits were read from real published files. For
all others the reader was tested on a small copy of the published layout, made from public descriptions; a file that differs
from them shows up as an error that names it, or as a wrong number of images in `check`. Addresses and checksums are those
that other public catalogues state; none of the downloads could be tried when this was written. Licences are the publishers'
own and are not repeated here: read them at the source before you use a data set.

Order of images, and with it the random splits, is that of sorted file names (see [differences](differences.md)).

| years in FULL | data set | kind | classes | files | how to get them | read from real files | notes |
|---|---|---|---|---|---|---|---|
"""
REAL = {"landsat": "yes", "fashion_mnist": "yes", "mnist": "10,000 digits, as IDX"}


def main():
    years = defaultdict(list)
    for entry in stream.named_streams()["full"]:
        years[entry["task"]].append(str(entry["year"]))
    catalogue, rows = datasets.catalogue(Path("data")), []
    for key in years:
        dataset = catalogue[key]
        by_hand = list(dict.fromkeys(file["manual"] for file in dataset.files if fetch.is_manual(file)))
        how = "by hand: " + " / ".join(by_hand) if by_hand else "fetched"
        cells = (", ".join(years[key]), f"{dataset.name} (`{key}`)", dataset.kind.replace("_", " "), f"{dataset.classes}",
                 fetch.few([file for file in dataset.files if "instead_of" not in file]), how, REAL.get(key, "no"),
                 dataset.note)
        rows.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ").strip() for cell in cells) + " |\n")
    Path("docs/datasets.md").write_text(HEAD + "".join(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
