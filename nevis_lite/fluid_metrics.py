"""The numbers of FLUID: accuracy of one prediction at a time, detection of unseen classes, and compute.

Only numpy is needed, so that a run can be read anywhere: `python -m nevis_lite.fluid_metrics RUN...` shows one run, or mean and
standard deviation of several seeds.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nevis_lite import compare
from nevis_lite.config import UserError, read_yaml
from nevis_lite.fluid_sequence import Sequence, read_npz
from nevis_lite.metrics import columns, shown

# Numbers of earlier examples of a sample's class, as (name, first, last).
EARLIER = (("0", 0, 0), ("1", 1, 1), ("2-4", 2, 4), ("5-9", 5, 9), ("10-24", 10, 24), ("25-49", 25, 49), ("50+", 50, np.inf))
BUCKETS = ("pretrain_head", "pretrain_tail", "novel_head", "novel_tail")
FREE = ("seed", "methods", "data.dir", "device", "threads", "checkpoint_seconds")  # settings that runs to average may differ in


# ---- what a learner leaves behind -----------------------------------------------------------------------------------


@dataclass
class Meter:
    """Multiply-adds spent so far, twice: with a frozen backbone's features kept (cached) or computed for every visit.

    `forward_macs` of the backbone and `head_macs` are per image; the paper takes the head to be free. As in the paper, a
    backward pass costs as much as a forward pass. In truth it is about twice as much: then `backward` is to be added once more.
    """

    forward_macs: float
    head_macs: float = 0.0
    cached: float = 0.0
    uncached: float = 0.0
    backward: float = 0.0  # the share of backward passes in both of them

    def predict(self, images: int):
        """Forward passes of the whole network."""
        self._spend(images * (self.forward_macs + self.head_macs))

    forward = predict  # also of a second network that teaches

    def train(self, images: int, full: bool):
        """Forward and backward passes of the full network, or of the head alone."""
        trained = images * (self.head_macs + (self.forward_macs if full else 0.0))
        self._spend(2 * trained)
        self.backward += trained
        if not full:
            self.uncached += images * self.forward_macs

    def _spend(self, macs: float):
        self.cached += macs
        self.uncached += macs


@dataclass
class Log:
    """What a learner did on a sequence of T samples."""

    pred: np.ndarray  # (T,) int64, the known slot with the highest score; -1: none is known, or scores are no numbers
    novelty: dict[str, np.ndarray]  # by score (T,) float32, higher where an unseen class is more likely
    macs_cached: np.ndarray  # (T,) float64, see `Meter`, after each sample
    macs_uncached: np.ndarray
    macs_backward: np.ndarray
    updates: list[dict]  # {"t", "epochs", "images"} of those that were carried out

    def save(self, path):
        """Write an .npz, to a path or an open file, that numpy reads without pickle."""
        np.savez(path, pred=self.pred, macs_cached=self.macs_cached, macs_uncached=self.macs_uncached,
                 macs_backward=self.macs_backward, updates=np.array(json.dumps(self.updates)),
                 **{f"novelty_{score}": values for score, values in self.novelty.items()})

    @classmethod
    def load(cls, path: str | Path) -> Log:
        """What `save` wrote; UserError where it didn't write it."""
        macs = ("macs_cached", "macs_uncached", "macs_backward")
        found = read_npz(path, ("pred", *macs, "updates"))
        novelty = {name.removeprefix("novelty_"): values for name, values in found.items() if name.startswith("novelty_")}
        return cls(found["pred"], novelty, *(found[name] for name in macs), json.loads(str(found["updates"])))


# ---- one learner on one sequence ------------------------------------------------------------------------------------


def evaluate(log: Log, sequence: Sequence, thresholds: dict[str, float | None] | None = None, windows: int = 180) -> dict:
    """The metrics as plain values; what is undefined is None, with its reason in "missing".

    "overall": share of hits, where the first sample of a new class cannot be one; "mean_class": mean over the classes of their
    accuracies; BUCKETS: the same over pretrained or novel classes in the head or the tail; "last_fifth": of the samples.
    "unseen": by score, and of the clock (early samples are new), how well new classes are told apart: `auroc`, `f1` at the best
    threshold, and the AUROC within `windows` parts of the sequence. "open_accuracy": by score, where a sample whose score is
    above its threshold is called new, and is a hit iff it is. "earlier": accuracy by number of earlier samples of the class.
    "over_time": running and windowed accuracy, and multiply-adds, at the end of each window. "macs": all multiply-adds;
    "_usual" where a backward pass costs twice a forward pass, as usual, and not once, as in the paper. "updates": how many.
    Raises ValueError when the log is of another sequence, or empty.
    """
    length, count = len(sequence.label), sequence.count
    if length == 0 or len(log.pred) != length:
        raise ValueError(f"A log of {len(log.pred)} samples and a sequence of {length} do not go together.")
    missing: dict[str, str] = {}
    hit, new = log.pred == sequence.label, sequence.new
    present = count > 0
    by_class = np.bincount(sequence.label, hit, minlength=len(count)) / np.maximum(count, 1)
    pretrained = np.arange(len(count)) < sequence.known
    found = {"overall": float(hit.mean()), "mean_class": float(by_class[present].mean())}
    for bucket, members in zip(BUCKETS, (pretrained & sequence.head, pretrained & ~sequence.head, ~pretrained & sequence.head,
                                         ~pretrained & ~sequence.head), strict=True):
        members = members & present
        found[bucket] = float(by_class[members].mean()) if members.any() else None
        if not members.any():
            missing[bucket] = f"no {bucket.replace('_', ' ')} class"
    if not present.all():
        missing["classes"] = f"{np.sum(~present)} of {len(count)} classes have no sample and are in no mean"
    found["last_fifth"] = float(hit[-max(length // 5, 1):].mean())

    edges = np.linspace(0, length, min(windows, length) + 1).astype(int)
    scores = {score: _certain(log, score) for score in log.novelty}
    found["unseen"] = {score: _detection(values, new, edges, f"unseen.{score}", missing)
                       for score, values in {**scores, "clock": -np.arange(length)}.items()}
    found["open_accuracy"] = {score: _open_accuracy(hit, new, scores[score], tau) for score, tau in (thresholds or {}).items()}
    missing |= {f"open_accuracy.{score}": "the score has no threshold, or is not a number"
                for score, value in found["open_accuracy"].items() if value is None}
    earlier = _earlier(sequence.label)
    found["earlier"] = {
        kind: {name: _share(hit[where & (earlier >= first) & (earlier <= last)]) for name, first, last in EARLIER}
        for kind, where in (("pretrain", sequence.label < sequence.known), ("novel", sequence.label >= sequence.known))}
    done, hits = edges[1:], np.append(0, np.cumsum(hit))[edges]
    found["over_time"] = {"samples": done.tolist(), "accuracy": (hits[1:] / done).tolist(),
                          "windowed": (np.diff(hits) / np.diff(edges)).tolist(),
                          "macs_cached": log.macs_cached[done - 1].tolist(),
                          "macs_uncached": log.macs_uncached[done - 1].tolist()}
    cached, uncached, backward = (float(macs[-1]) for macs in (log.macs_cached, log.macs_uncached, log.macs_backward))
    found["macs"] = {"cached": cached, "uncached": uncached, "cached_usual": cached + backward,
                     "uncached_usual": uncached + backward}
    return {**found, "updates": len(log.updates), "missing": missing}


def auroc(scores: np.ndarray, positives: np.ndarray) -> float | None:
    """Probability that a positive has a higher score than a negative, where equal scores count half; None without either.

    `scores` (N,), `positives` (N,) bool.
    """
    pairs = int(positives.sum()) * int((~positives).sum())
    if not pairs:
        return None
    _, place, ties = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(ties) - (ties - 1) / 2)[place]  # the mean rank of those with equal scores
    return float((ranks[positives].sum() - positives.sum() * (positives.sum() + 1) / 2) / pairs)


def windowed_auroc(scores: np.ndarray, positives: np.ndarray, edges: np.ndarray) -> float | None:
    """`auroc` over pairs from the same window only; window w holds samples edges[w] to edges[w + 1]. None without a pair."""
    values, pairs = [], []
    for begin, end in zip(edges[:-1], edges[1:], strict=True):
        inside = positives[begin:end]
        values.append(auroc(scores[begin:end], inside) or 0.0)  # that of a window without pairs weighs nothing
        pairs.append(int(inside.sum()) * int((~inside).sum()))
    return float(np.average(values, weights=pairs)) if any(pairs) else None


def best_f1(scores: np.ndarray, positives: np.ndarray) -> float | None:
    """The highest F1 of any threshold at or above which a sample is called positive; None without positives."""
    if not positives.any():
        return None
    order = np.argsort(-scores, kind="stable")
    falls = np.append(scores[order][1:] != scores[order][:-1], True)  # equal scores, also infinite ones, are called the same
    last = np.flatnonzero(falls)
    return float(np.max(2 * np.cumsum(positives[order])[last] / (last + 1 + positives.sum())))


def fit_threshold(log: Log, sequence: Sequence, score: str) -> float | None:
    """The threshold above which a novelty score means a new class, for the best open accuracy on a validation sequence.

    Always finite: that of never is the highest score, that of always just below the lowest one. Of equally good ones the
    highest, which calls the fewest samples new. None where scores are not numbers.
    """
    scores, hit, new = _certain(log, score), log.pred == sequence.label, sequence.new
    finite = np.unique(scores[np.isfinite(scores)])
    if np.isnan(scores).any() or not len(finite):
        return None
    candidates = np.append(np.nextafter(finite[0], -np.inf), finite)
    # At a threshold of candidates[i] the hits are the known samples at most as high, and the new ones above.
    known = np.searchsorted(np.sort(scores[hit & ~new]), candidates, side="right")
    above = new.sum() - np.searchsorted(np.sort(scores[new]), candidates, side="right")
    right = known + above
    return float(candidates[np.flatnonzero(right == right.max())[-1]])


def _certain(log: Log, score: str) -> np.ndarray:
    """(T,) float64 of a novelty score; a first sample without any known class is certainly of a new one."""
    nothing_known = (log.pred < 0) & (np.arange(len(log.pred)) == 0)  # later on, -1 tells of a training that diverged
    return np.where(nothing_known, np.inf, log.novelty[score].astype(np.float64))


def _detection(scores: np.ndarray, new: np.ndarray, edges: np.ndarray, key: str, missing: dict) -> dict:
    if np.isnan(scores).any():
        missing[key] = "scores are not numbers: the training has diverged"
        return dict.fromkeys(UNSEEN)
    found = {"auroc": auroc(scores, new), "windowed_auroc": windowed_auroc(scores, new, edges), "f1": best_f1(scores, new)}
    if not new.any():
        missing[key] = "no sample is of a new class"
    elif None in found.values():
        missing[key] = "no window holds samples of new classes and of known ones"
    return found


def _open_accuracy(hit: np.ndarray, new: np.ndarray, scores: np.ndarray, tau: float | None) -> float | None:
    if tau is None or np.isnan(scores).any():
        return None
    return float(np.mean(np.where(new, scores > tau, hit & (scores <= tau))))


def _earlier(labels: np.ndarray) -> np.ndarray:
    """(T,) number of earlier samples with the same label."""
    order = np.argsort(labels, kind="stable")
    sizes = np.bincount(labels)
    earlier = np.empty(len(labels), np.int64)
    earlier[order] = np.arange(len(labels)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return earlier


def _share(hit: np.ndarray) -> dict:
    return {"samples": len(hit), "accuracy": float(hit.mean()) if len(hit) else None}


# ---- runs, and the command ------------------------------------------------------------------------------------------


def is_run(folder: str | Path) -> bool:
    """Whether a folder looks like that of a FLUID run."""
    return (Path(folder) / "sequence.npz").is_file()


def load(folder: str | Path) -> dict:
    """A run, also one that goes on: its results.json, with "settings" from config.yaml and the sequence's "counts" by slot.

    UserError when the folder holds no such run.
    """
    folder = Path(folder)
    try:
        run = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        settings = read_yaml((folder / "config.yaml").read_text(encoding="utf-8"), str(folder / "config.yaml"))
    except OSError as error:
        raise UserError(f"{folder}: holds no finished part of a FLUID run ({error}).") from None
    except ValueError as error:
        raise UserError(f"{folder / 'results.json'}: is damaged ({error}); delete it, and the run with --resume makes it "
                        "anew.") from None
    if not isinstance(run, dict) or run.get("kind") != "fluid":
        raise UserError(f"{folder}: holds another kind of run; FLUID's are made by python -m nevis_lite.fluid.")
    sequence = Sequence.load(folder / "sequence.npz")
    return {**run, "settings": settings or {}, "counts": sequence.count.tolist(), "threshold": sequence.threshold}


def comparison(runs: list[dict]) -> dict:
    """Runs that differ in their seeds only: by method, {"n", "mean", "sd"} in place of each number of `evaluate`.

    Lists as in "over_time" are left out. ValueError when two runs have the same seed, or differ in more than that.
    """
    check_seeds(runs)
    methods = dict.fromkeys(method for run in runs for method in run["methods"])
    return {"seeds": [run["seed"] for run in runs],
            "methods": {method: _spread([run["methods"][method] for run in runs if method in run["methods"]])
                        for method in methods}}


def check_seeds(runs: list[dict]):
    """ValueError unless these runs can be averaged."""
    seeds = [run["seed"] for run in runs]
    twice = next((seed for seed in seeds if seeds.count(seed) > 1), None)
    if twice is not None:
        raise ValueError(f"Two runs have seed {twice}: name only one of them.")
    first, *others = [_flat(run["settings"]) for run in runs]
    for run, other in zip(runs[1:], others, strict=True):
        for key in {**first, **other}:
            if key not in FREE and first.get(key) != other.get(key):
                raise ValueError(f"{runs[0]['name']} and {run['name']} differ in {key} ({first.get(key)!r} and "
                                 f"{other.get(key)!r}): only runs that differ in their seeds can be averaged.")


def name_of(run: dict) -> str:
    """What the runs of a config are called without their seeds."""
    return re.sub(r"-seed\d+$", "", run["name"])


def _flat(settings: dict, prefix: str = "") -> dict:
    found = {}
    for key, value in settings.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def _spread(values: list) -> dict:
    """Nested dicts of numbers, one dict with a `compare.spread_of` in place of each number."""
    found = {}
    for key, first in values[0].items():
        if isinstance(first, dict) and key != "missing":
            found[key] = _spread([value[key] for value in values])
        elif isinstance(first, int | float | None):
            found[key] = compare.spread_of([value[key] for value in values])
    return found


ACCURACY = {"overall": "overall", "mean_class": "class mean", "pretrain_head": "PH", "pretrain_tail": "PT", "novel_head": "NH",
            "novel_tail": "NT", "last_fifth": "last 1/5"}
LEGEND = """PH, PT, NH, NT: means over the pretrained (P) and novel (N) classes in the head (H) and the tail (T).
GMAC: multiply-adds, with the features of a frozen backbone kept / computed for every visit; backward = forward."""
UNSEEN = {"auroc": "AUROC", "windowed_auroc": "windows", "f1": "F1"}
UNSEEN_LEGEND = """Windows: AUROC within short parts of the sequence. The pooled AUROC and F1 mostly measure time: see the
clock, which only knows that new classes come early. Open: accuracy where a sample may be called new, at a threshold from the
validation sequence."""


def table(run: dict) -> str:
    """A run as text: a row per method of accuracies and compute, then one per novelty score of unseen-class detection."""
    return f"{run['name']}\n\n" + _tables(run["methods"], shown, lambda rows: "\n".join(columns(rows, left=(0, 1))))


def comparison_table(runs: list[dict]) -> str:
    """`comparison` as GitHub markdown, mean ± standard deviation; raises as it does."""
    found = comparison(runs)
    title = f"{len(runs)} runs with the seeds {', '.join(map(str, found['seeds']))}\n\n"
    return title + _tables(found["methods"], compare.mean_and_sd, lambda rows: compare.markdown(rows[0], rows[1:]))


def _tables(methods: dict[str, dict], cell, drawn) -> str:
    def giga(value):
        return f"{(value['mean'] if isinstance(value, dict) else value) / 1e9:,.1f}"

    rows, clock = [], None
    accuracies = [["method", *ACCURACY.values(), "GMAC cached", "not cached"]]
    for method, found in methods.items():
        accuracies.append([method, *(cell(found[name]) for name in ACCURACY),
                           *(giga(found["macs"][name]) for name in ("cached", "uncached"))])
        for score, values in found["unseen"].items():
            cells = [cell(values[measure]) for measure in UNSEEN]
            if score == "clock":  # the same for every method
                clock = ["-", "clock", *cells, "-"]
            else:
                opened = found["open_accuracy"].get(score)
                rows.append([method, score, *cells, cell(opened) if opened is not None else "-"])
    if not methods:
        return "No method has finished."
    unseen = [["method", "unseen classes by", *UNSEEN.values(), "open"], *rows, clock]
    return f"{drawn(accuracies)}\n\n{drawn(unseen)}\n\n{LEGEND}\n{UNSEEN_LEGEND}"


def main(argv: list[str] | None = None) -> None:
    """`python -m nevis_lite.fluid_metrics RUN... [--json]`; exits with 2 when a run cannot be read or compared."""
    parser = argparse.ArgumentParser(prog="python -m nevis_lite.fluid_metrics", allow_abbrev=False,
                                     description="Show a FLUID run, or mean and standard deviation of several seeds.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run, also of one that goes on")
    parser.add_argument("--json", action="store_true", help="print JSON: the run, or the means")
    arguments = parser.parse_args(argv)
    try:
        runs = [load(folder) for folder in arguments.runs]
        if arguments.json:
            print(json.dumps(runs[0] if len(runs) == 1 else comparison(runs), indent=1, allow_nan=False), flush=True)
        else:
            print(table(runs[0]) if len(runs) == 1 else comparison_table(runs), flush=True)
    except BrokenPipeError:  # the reader, such as head, has seen enough
        sys.stdout = None
    except (UserError, ValueError) as problem:
        print(problem, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
