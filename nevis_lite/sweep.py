"""Runs over a grid of settings, one after the other, a folder each: `python -m nevis_lite.sweep --config short_ftd.yaml
search.trials=2,4,8 fit.steps=10000,50000 seed=0,1,2`.

Started again, the same command skips what is done and goes on with what is not. At its end stands the comparison of all runs,
with the Pareto front of error and compute (paper, Fig. 4).
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from pathlib import Path

from nevis_lite import config, metrics, parallel, train
from nevis_lite.config import UserError
from nevis_lite.run_folder import refuse_another_config


def grid(configs: list[str], overrides: list[str]) -> dict[str, tuple[str, list[str]]]:
    """{name of the run: (config, overrides)} for each combination; UserError if one of them is no config.

    `overrides` are section.key=value,value,...; commas inside of brackets do not separate. A key with one value goes without
    saying in the name.
    """
    if not configs:
        raise UserError("--config needs a file.")
    axes = []
    for override in overrides:
        key, equals, values = override.partition("=")
        parts = _split(values)
        axes.append([(f"{key}{equals}{value}", f"-{key.split('.')[-1]}{value}" * (len(parts) > 1 and key != "seed"))
                     for value in parts])
    runs, known = {}, []
    for name, *chosen in itertools.product(configs, *axes):
        settings = config.load(name, [override for override, _ in chosen])
        run = f"{config.find_config(name).stem}{''.join(part for _, part in chosen)}-seed{settings.seed}"
        run = re.sub(r"[^\w.+-]+", "_", run)
        if run in runs or settings in known:
            raise UserError(f"two runs of the sweep would be the same, or called the same, {run}: name each value once.")
        known.append(settings)
        runs[run] = name, [override for override, _ in chosen]
    return runs


def _split(values: str) -> list[str]:
    """At the commas that are not inside of brackets."""
    parts, depth = [""], 0
    for letter in values:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code: 0 all done, 130 interrupted, else that of the first run that failed."""
    parser = argparse.ArgumentParser(prog="python -m nevis_lite.sweep", allow_abbrev=False,
                                     description="Run every combination of configs and values, and compare the results.",
                                     epilog="example: python -m nevis_lite.sweep --config demo_indep.yaml demo_ftd.yaml --out "
                                            "runs/budgets search.trials=2,4 fit.steps=150,300 seed=0,1,2")
    parser.add_argument("--config", required=True, nargs="+", metavar="FILE", help="YAML files, looked up here and in configs/")
    parser.add_argument("--out", default="runs", metavar="DIR", help="the run folders lie in it (default: %(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="name the runs, and stop")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value,value", help="values to go through")
    arguments = parser.parse_intermixed_args(argv)
    overrides = [word for word in (*arguments.config, *arguments.overrides) if "=" in word]  # --config takes them, too
    try:
        if parallel.launched():
            raise UserError("a sweep goes without torchrun: processes=N shares each of its runs among N processes.")
        runs = grid([word for word in arguments.config if "=" not in word], overrides)
        for run, (name, chosen) in runs.items():  # better now than after the runs before it
            if (Path(arguments.out) / run / "config.yaml").is_file():
                refuse_another_config(Path(arguments.out) / run, config.to_dict(config.load(name, chosen)))
    except UserError as error:
        print(error, file=sys.stderr)
        return error.code
    if arguments.dry_run:
        print("\n".join(runs))
        return 0
    failed, folders = {}, []
    for number, (run, (name, chosen)) in enumerate(runs.items(), start=1):
        folder = Path(arguments.out) / run
        print(f"run {number} of {len(runs)}: {folder}", flush=True)
        code = train.main(["--config", name, "--out", str(folder), "--resume", *chosen])
        if code == 130:
            print("To go on with the sweep, give its own command again.", file=sys.stderr)
            return code
        if code:
            failed[run] = code
        else:
            folders.append(folder)
    if len(folders) > 1:
        try:
            print(f"\n{metrics.describe([metrics.load(folder) for folder in folders])[1]}")
        except ValueError as error:
            print(error)
    if failed:
        print(f"{len(failed)} of {len(runs)} runs failed: {', '.join(failed)}", file=sys.stderr)
    return next(iter(failed.values()), 0)


if __name__ == "__main__":
    sys.exit(main())
