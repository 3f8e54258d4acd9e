"""Train a lifelong learner over a stream of tasks: `python -m nevis_lite.train --config demo_ftd.yaml`."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import time
from pathlib import Path

from nevis_lite import config, metrics, stream
from nevis_lite.config import Config, UserError
from nevis_lite.progress import clock

# torch is imported by the functions that need it, so that --help and a wrong key are answered at once.


def run(settings: dict | Config, out: str | Path, resume: bool = False) -> dict:
    """Run `settings` into the folder `out` and return the content of its results.json."""
    from nevis_lite import protocol

    settings = config.from_dict(settings) if isinstance(settings, dict) else settings
    return protocol.run(protocol.set_up(settings), out, resume)


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code: 0 done, 2 wrong use, 3 data missing, 130 interrupted with a checkpoint."""
    parser = argparse.ArgumentParser(
        prog="python -m nevis_lite.train", allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Train a lifelong learner over a stream of tasks, and report its error and all compute it spent.",
        epilog=f"keys, with their defaults:\n{config.describe()}\n\nexample: python -m nevis_lite.train --config "
               "demo_ftd.yaml seed=1 search.trials=8")
    parser.add_argument("--config", required=True, metavar="FILE", help="a YAML file, looked up here and in configs/")
    parser.add_argument("--out", metavar="DIR", help="run folder (default: runs/<config>-seed<seed>)")
    parser.add_argument("--resume", action="store_true", help="go on with the run in the folder, if there is one")
    parser.add_argument("--dry-run", action="store_true", help="print what the run would cost, and stop")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="replaces a key of the file")
    arguments = parser.parse_intermixed_args(argv)
    try:
        settings = config.load(arguments.config, arguments.overrides)
        out = Path(arguments.out or f"runs/{config.find_config(arguments.config).stem}-seed{settings.seed}")
        stream.load(settings.stream, settings.data.dir, settings.phase)  # says what is missing before torch is loaded
        from nevis_lite import protocol

        setup = protocol.set_up(settings)
        if arguments.dry_run:
            print(dry_run(setup))
            return 0
        resumed = [*(word for word in (sys.argv[1:] if argv is None else argv) if word != "--resume"), "--resume"]
        command = "python -m nevis_lite.train " + shlex.join(resumed)
        try:
            results = protocol.run(setup, out, arguments.resume, command)
        except protocol.Interrupted:
            print(f"\nStopped; a checkpoint lies in {out}. To go on:\n{command}", file=sys.stderr)
            return 130
        print(f"\n{metrics.table(results)}\n\nIn {out}: results.json, trials.jsonl, predictors/")
        return 0
    except UserError as error:
        print(error, file=sys.stderr)
        return error.code


def dry_run(setup) -> str:
    """A table of what the run would cost: sizes, FLOPs (exactly the ledger of the run), bytes, and predicted time."""
    from nevis_lite import fit, flops, protocol

    settings, rows = setup.config, protocol.plan(setup)
    lines = [f"{'task':>4}  {'year':<4}  {'name':<22} {'train':>8} {'batch':>5} {'steps':>7} {'trials':>6} {'compute':>12} "
             f"{'cache':>9} {'time':>9}"]
    timed, total_seconds = {}, 0.0
    for row in rows:
        task, batch = row["task"], row["batch"]
        if batch not in timed:
            timed[batch] = time_steps(setup, task, batch)
        step_seconds, image_seconds = timed[batch]
        steps, trials = settings.fit.steps, settings.search.trials
        images = sum(row["flops"][phase] for phase in ("validate", "select", "predict")) / setup.image_flops(task)[0]
        seconds = trials * steps * step_seconds + images * image_seconds
        total_seconds += seconds
        cache = sum(path.stat().st_size for path in setup.folders[task.index].iterdir())
        lines.append(f"{task.index:>4}  {task.year:<4}  {task.name[:22]:<22} {row['num_train']:>8} {batch:>5} {steps:>7} "
                     f"{trials:>6} {metrics.human(flops.total(row['flops'])):>12} {cache / 1e6:>6.1f} MB {clock(seconds):>9}")
    ledger = flops.add(*(row["flops"] for row in rows))
    weights = sum(value.numel() * value.element_size()
                  for value in fit.models.build(settings.model.name).state_dict().values())
    caches = sum(path.stat().st_size for folder in set(setup.folders) for path in folder.iterdir())
    disk = caches + weights * (len(rows) + 8)  # a predictor a task, and two checkpoints of four sets of weights
    lines += ["", "compute: " + ", ".join(f"{phase} {metrics.human(count)}" for phase, count in ledger.items())
              + f"; all {metrics.human(flops.total(ledger))} ({flops.total(ledger)} FLOPs)",
              f"on disk: {disk / 1e6:.0f} MB (pixel cache {caches / 1e6:.0f} MB, predictors and checkpoints the rest); "
              f"free here: {shutil.disk_usage('.').free / 1e9:.0f} GB",
              f"predicted time on {protocol.device_name(setup.device)}: {clock(total_seconds)} "
              f"({total_seconds / 3600:.2f} hours), from a few timed steps for each batch size"]
    return "\n".join(lines)


def time_steps(setup, task, batch: int) -> tuple[float, float]:
    """Measured seconds of one training step and of predicting one image, at a task's real data and batch."""
    import torch

    from nevis_lite import baselines, fit
    from nevis_lite.data import EndlessStream

    settings, view = setup.config, setup.view(task, [])
    model = baselines.initial_model(view, None)
    batches = EndlessStream(view.split("train"), batch, settings.data, settings.model.image_size, (0,))
    trial, picks = fit.start(model, settings.fit), torch.arange(min(256, len(view.split("dev"))))

    def measure(work, repeats):
        work()  # the first call is slower
        if setup.device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(repeats):
            work()
        if setup.device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - began) / repeats

    step = measure(lambda: fit.update(trial, batches, {"lr": 0.01, "label_smoothing": 0.0}, settings.fit), 5)
    image = measure(lambda: fit.predict(model, view.split("dev"), settings.model.image_size, settings.fit, picks), 3)
    return step, image / len(picks)


if __name__ == "__main__":
    sys.exit(main())
