"""FLUID runs made up, without a network: learners that know a share of the truth, which grows with the examples."""

import json

import numpy as np
import yaml

from nevis_lite.fluid_metrics import Log, evaluate, fit_threshold
from nevis_lite.fluid_sequence import build_sequence

METHODS = {"ncm": (0.6, 0.0), "ft": (0.8, 3e6), "standard": (0.5, 6e6)}  # skill, and multiply-adds of training


def log_of(sequence, skill, training=0.0, seed=0):
    random, length = np.random.default_rng(seed), len(sequence.label)
    right = random.random(length) < skill * (1 - np.exp(-np.arange(length) / 200))
    pred = np.where(right & ~sequence.new, sequence.label, (sequence.label + 1) % len(sequence.classes))
    novelty = {score: (sequence.new + random.normal(0, 1, length)).astype(np.float32) for score in ("msp", "mdt")}
    macs = 1e3 * np.arange(1, length + 1.0)
    trained = training * (np.arange(1, length + 1) >= length // 2)
    return Log(pred, novelty, macs, macs + trained, np.zeros(length), [{"t": length // 2, "epochs": 4, "images": 4}])


def run(folder, seed=0, methods=METHODS, settings=None, **options):
    """The folder of a run as `fluid.py` leaves it."""
    labels = np.repeat(np.arange(30), 400)
    first, second = (build_sequence(labels, range(15), **{"n_classes": 12, "c": 8, "seed": number, **options})
                     for number in (seed, 100 + seed))
    folder.mkdir()
    first.save(folder / "sequence.npz")
    results = {"kind": "fluid", "name": folder.name, "seed": seed, "methods": {}, "sequence": {
        "hash": first.hash, "samples": len(first.label), "classes": 12, "known": first.known, "head": int(first.head.sum())}}
    for name, (skill, training) in methods.items():
        tried = log_of(second, skill, training, seed + 50)
        thresholds = {score: fit_threshold(tried, second, score) for score in tried.novelty}
        results["methods"][name] = {**evaluate(log_of(first, skill, training, seed), first, thresholds, windows=20),
                                    "thresholds": thresholds, "seconds": 1.5}
    (folder / "results.json").write_text(json.dumps(results, allow_nan=False), encoding="utf-8")
    (folder / "config.yaml").write_text(yaml.safe_dump({"seed": seed, "learn": {"lr": 0.1}, **(settings or {})}))
    return folder
