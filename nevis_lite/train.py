"""Train a lifelong learner over a stream of tasks: `python -m nevis_lite.train --config demo_ftd.yaml`."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from nevis_lite import config, metrics, parallel, stream
from nevis_lite.config import Config, UserError
from nevis_lite.parallel import Interrupted, Team

COMMAND = ["-m", "nevis_lite.train"]
WORTHWHILE = 200  # steps of a task's trials from which on several processes share them by themselves

# torch is imported by the functions that need it, so that --help and a wrong key are answered at once.


def run(settings: dict | Config, out: str | Path, resume: bool = False) -> dict:
    """Run `settings` into the folder `out` and return the content of its results.json."""
    from nevis_lite import protocol
    from nevis_lite.setup import set_up

    team = parallel.join()
    with team.together():
        settings = config.from_dict(settings) if isinstance(settings, dict) else settings
        loaded = stream.load(settings.stream, settings.data.dir, settings.phase)
        return protocol.run(team.in_turn(lambda: set_up(settings, loaded)), out, resume, team=team)


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code: 0 done, 2 wrong use, 3 data missing, 130 interrupted."""
    parser = config.parser_of(
        "train", "Train a lifelong learner over a stream of tasks, and report its error and all compute it spent.", Config(),
        "run folder", "go on with the run in the folder, if there is one", "demo_ftd.yaml seed=1 search.trials=8")
    parser.add_argument("--dry-run", action="store_true", help="print what the run would cost, and stop")
    arguments = parser.parse_intermixed_args(argv)
    words = sys.argv[1:] if argv is None else argv
    team = Team()

    def say(text):
        if parallel.rank() == 0:
            print(text, file=sys.stderr)

    try:
        team = parallel.join()
        with team.together():
            return _carry_out(arguments, words, team)
    except UserError as error:
        say(error)
        return error.code
    except Interrupted:
        say(f"\nStopped; the run goes on where it was. To go on:\n{_command(words)}")
        return 130
    except OSError as error:  # a full disk, a folder that cannot be written
        say(f"{error.filename or 'Writing'}: {error.strerror or error}.")
        return 2
    except KeyboardInterrupt:
        say("\nStopped at once; a run that had begun goes on with --resume.")
        return 130
    finally:
        team.leave()


def _carry_out(arguments: argparse.Namespace, words: list[str], team: Team) -> int:
    """Run, by itself or as several processes, or only tell the cost, and print the table. Returns the exit code."""
    settings = config.load(arguments.config, arguments.overrides)
    out = config.out_of(arguments, settings.seed)
    # says what is missing before torch is loaded
    loaded = stream.load(settings.stream, settings.data.dir, settings.phase, arguments.dry_run)
    processes = team.world if parallel.launched() else _processes(settings)  # a dry run tells what they would take
    done = (out / "results.json").is_file()  # only its table is to be printed
    if processes > 1 and not (parallel.launched() or arguments.dry_run or done):
        if not _is_ours():
            raise UserError(f"processes={processes}: a script of your own is started by torchrun --nproc-per-node={processes}.")
        what = "the trials of each task" if settings.parallel == "trials" else "each batch"
        print(f"{processes} processes share {what} (processes=1: one does it all)", flush=True)
        return parallel.launch(processes, [sys.executable, *COMMAND, *words])
    from nevis_lite import cost, protocol
    from nevis_lite.setup import set_up

    setup = team.in_turn(lambda: set_up(settings, loaded, arguments.dry_run))
    if arguments.dry_run:
        print(cost.table(setup, processes))
        return 0
    results = protocol.run(setup, out, arguments.resume, _command(words), team)
    print(f"\n{metrics.table(results)}\n\nIn {out}: results.json, trials.jsonl, predictors/")
    return 0


def _processes(settings: Config) -> int:
    """How many train the run: what the config says, or for one with `threads` as many as the cores allow.

    By itself only for trials that do not wait for each other and are worth the start of more processes.
    """
    searched = settings.baseline.search or settings.baseline.name
    if settings.processes:
        return settings.processes
    if not settings.threads or settings.parallel != "trials" or searched in ("gp_ucb", "bhpo") or not _is_ours():
        return 1
    together = min(settings.search.trials, parallel.cores() // settings.threads)
    return max(1, together if settings.search.trials * settings.fit.steps >= WORTHWHILE else 1)


def _is_ours() -> bool:
    """Whether the process runs this command or a sweep, not a user's script that calls `main`."""
    return Path(sys.argv[0]).resolve().parent == Path(__file__).resolve().parent


def _command(words: list[str]) -> str:
    """What to type to go on with this run."""
    script = COMMAND if _is_ours() else [sys.argv[0]]
    words = (word for word in words if word != "--resume")
    return shlex.join([*(parallel.torchrun() or ["python"]), *script, "--resume", *words])


if __name__ == "__main__":
    sys.exit(main())
