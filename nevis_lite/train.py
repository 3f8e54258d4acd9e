"""Train a lifelong learner over a stream of tasks: `python -m nevis_lite.train --config demo_ftd.yaml`."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from nevis_lite import config, metrics, parallel, stream
from nevis_lite.config import Config, UserError
from nevis_lite.parallel import Interrupted, Team

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
    command = _command(sys.argv[1:] if argv is None else argv)
    team = parallel.join()

    def say(text):
        if team.rank == 0:
            print(text, file=sys.stderr)

    try:
        with team.together():
            _carry_out(arguments, command, team)
        return 0
    except UserError as error:
        say(error)
        return error.code
    except Interrupted:
        say(f"\nStopped; the run goes on where it was. To go on:\n{command}")
        return 130
    except OSError as error:  # a full disk, a folder that cannot be written
        say(f"{error.filename or 'Writing'}: {error.strerror or error}.")
        return 2
    except KeyboardInterrupt:
        say("\nStopped at once; a run that had begun goes on with --resume.")
        return 130
    finally:
        team.leave()


def _carry_out(arguments: argparse.Namespace, command: str, team: Team):
    """Run, or only tell the cost, and print the table."""
    settings = config.load(arguments.config, arguments.overrides)
    out = config.out_of(arguments, settings.seed)
    # says what is missing before torch is loaded
    loaded = stream.load(settings.stream, settings.data.dir, settings.phase, arguments.dry_run)
    from nevis_lite import cost, protocol
    from nevis_lite.setup import set_up

    setup = team.in_turn(lambda: set_up(settings, loaded, arguments.dry_run))
    if arguments.dry_run:
        print(cost.table(setup))
        return
    results = protocol.run(setup, out, arguments.resume, command, team)
    print(f"\n{metrics.table(results)}\n\nIn {out}: results.json, trials.jsonl, predictors/")


def _command(arguments: list[str]) -> str:
    """What to type to go on with this run: this module, or the script that called `main`."""
    ours = Path(sys.argv[0]).resolve().parent == Path(__file__).resolve().parent  # this command or a sweep
    script = ["-m", "nevis_lite.train"] if ours else [sys.argv[0]]
    launcher = ["torchrun", f"--nproc-per-node={parallel.world()}"] if parallel.world() > 1 else ["python"]
    return shlex.join([*launcher, *script, "--resume", *(word for word in arguments if word != "--resume")])


if __name__ == "__main__":
    sys.exit(main())
