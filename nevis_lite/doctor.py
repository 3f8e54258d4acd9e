"""The data of a stream: what is there (`check`), and getting the rest (`prepare`), for `python -m nevis_lite.stream`."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from pathlib import Path

from nevis_lite import cache, datasets, fetch
from nevis_lite.config import DataConfig, MissingData, UserError
from nevis_lite.datasets import DataSet
from nevis_lite.raw import legible


def state_of(dataset: DataSet, settings: DataConfig) -> tuple[str, dict | None]:
    """What there is of a data set, and the facts about its cache if it is built.

    embedded: in the package; cached; ready: all files are there; partial: some; downloadable; manual: some file has to be
    brought by hand.
    """
    meta, lacking = cache.meta_of(cache.folder_of(dataset, settings)), fetch.absent(dataset)
    if not dataset.files and dataset.folder.is_relative_to(datasets.PACKAGE):
        return "embedded", meta
    if not lacking and not datasets.is_missing(dataset):
        return ("cached" if meta else "ready"), meta
    if any(datasets.is_there(dataset.folder, file["name"]) for file in dataset.files):
        return "partial", None
    return ("manual" if any(fetch.is_manual(file) for file in lacking) or not lacking else "downloadable"), None


def check(found: list[DataSet], settings: DataConfig) -> tuple[str, bool]:
    """The doctor: a row a data set, and whether nothing is missing. Looks at names and sizes of files, not into them."""
    lines = [f"{'data set':<24} {'state':<12} {'classes':>7} {'train':>8} {'dev':>7} {'dev_test':>8} {'test':>7} {'files':>9} "
             f"{'cache':>9}  splits"]
    states = Counter()
    for dataset in found:
        state, meta = state_of(dataset, settings)
        states[state] += 1
        sizes = meta["sizes"] if meta else {}
        train, dev, dev_test, test = (sizes.get(name, "-") for name in datasets.SPLITS)
        cached = _bytes_in(cache.folder_of(dataset, settings)) if meta else 0
        digests = json.dumps(meta["splits"]).encode() if meta and "splits" in meta else b""
        last = f"lacks {fetch.few(fetch.absent(dataset))}" if state == "partial" else ""
        last = hashlib.sha256(digests).hexdigest()[:12] if digests else last
        last += _unexpected(dataset, meta) if meta else ""
        lines.append(f"{dataset.key:<24} {state:<12} {dataset.classes or '-':>7} {train:>8} {dev:>7} {dev_test:>8} {test:>7} "
                     f"{fetch.size_text(_bytes_in(dataset.folder)):>9} {fetch.size_text(cached) if meta else '-':>9}  {last}")
    counts = ", ".join(f"{count} {state}" for state, count in states.items())
    complete = not states.keys() & {"partial", "downloadable", "manual"}
    hint = "" if complete else "; `prepare` fetches what can be fetched and says what to do about the rest"
    return "\n".join([*(line.rstrip() for line in lines), f"{len(found)} data sets: {counts}{hint}"]), complete


def _unexpected(dataset: DataSet, meta: dict) -> str:
    """The splits of a cache that hold other numbers of images than those known for the published files."""
    if dataset.images_about:
        return ""
    others = [f"{name} {count}" for name, count in dataset.images.items() if meta["sizes"][name] != count]
    broken = f" ({meta['skipped']} broken)" if meta["skipped"] else ""
    return f"  expected {', '.join(others)}{broken}" if others else ""


def _bytes_in(folder: Path) -> int:
    return sum(map(os.path.getsize, datasets.files_below(folder)))


def prepare(found: list[DataSet], settings: DataConfig, raw: Path | None = None, accept_new_checksum: bool = False,
            stop_at_first: bool = False) -> dict[str, str]:
    """Fetch what can be fetched, say what to do about the rest, and build the caches. {key: what is wrong} of the others."""
    if raw and not raw.is_dir():
        raise UserError(f"--raw {raw}: no such folder.")
    uses = Counter(file["name"] for dataset in datasets.catalogue(Path(settings.dir)).values() for file in dataset.files)
    failed, hosts = {}, {}
    for number, dataset in enumerate(found, start=1):
        head = f"[{number:>{len(str(len(found)))}}/{len(found)}] {dataset.key}"
        try:
            meta = cache.meta_of(_prepare_one(dataset, settings, raw, uses, accept_new_checksum, hosts))
            empty = {split: counts.count(0) for split, counts in meta["class_counts"].items()}
            told = ", ".join(f"{count} in {split}" for split, count in empty.items() if count)
            print(f"{head}: ready, {sum(meta['sizes'].values())} images, {meta['num_classes']} classes"
                  f"{f' (without an image: {told})' if told else ''}", flush=True)
        except Exception as error:  # whatever is wrong with one data set, the others can be had
            words = legible(str(error) if isinstance(error, (UserError, OSError)) else f"{type(error).__name__}: {error}")
            failed[dataset.key] = words.splitlines()[0]
            print(f"{head}: " + words.replace("\n", "\n    "), flush=True)
            if stop_at_first:
                break
    return failed


def _prepare_one(dataset: DataSet, settings: DataConfig, raw: Path | None, uses: Counter, accept_new_checksum: bool,
                 hosts: dict[str, str]) -> Path:
    """Files first, then the cache, whose folder is returned. `hosts`: see `fetch.fetch`."""
    found = cache.folder_of(dataset, settings)
    if cache.meta_of(found):
        return found
    brought = [file for file in dataset.files if (dataset.folder / file["name"]).is_file()]
    for file in dataset.files if raw and fetch.absent(dataset) else []:
        if not datasets.is_there(dataset.folder, file["name"]) and fetch.link(file, dataset, raw, uses[file["name"]] == 1):
            brought.append(file)
    reasons = {}
    for file in fetch.absent(dataset):
        if not fetch.is_manual(file):
            try:
                fetch.fetch(file, dataset.folder, accept_new_checksum=accept_new_checksum, hosts=hosts)
            except fetch.FetchError as error:
                reasons.setdefault(error.reason, []).append(file["name"])
    lacking = fetch.absent(dataset)
    if lacking:
        first = f" ({next(iter(reasons))})" if reasons else ""
        told = [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()] if len(reasons) > 1 else []
        raise MissingData("\n".join([f"lacks {fetch.few(lacking)}{first}", *told, fetch.by_hand(lacking, dataset.folder)]))
    for file in brought:
        if problem := fetch.mismatch(dataset.folder / file["name"], file):
            print(f"{dataset.key}: {file['name']} is another edition than the known one, or damaged ({problem})", flush=True)
    return cache.prepare(dataset, settings)
