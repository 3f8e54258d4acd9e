"""Several processes of one run, as `torchrun` or `launch` start them: who does what, how they hear of each other, how they end.

What they tell each other is small and goes through a key-value store of torch.distributed; weights go through the run folder.
Only where they share each batch (`parallel: data`) are they a process group. A process alone imports none of it.
"""

from __future__ import annotations

import functools
import math
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, field

from nevis_lite.config import UserError

TORCHRUN = "TORCHELASTIC_RUN_ID"  # in the environment of what torchrun started
STORE, LAUNCHER = "NEVIS_LITE_STORE", "NEVIS_LITE_LAUNCHER"  # in that of what `launch` started: a file, and its own process
LOOK = 1.0  # seconds between two looks at whether another process asks to stop
PATIENCE = 10.0  # seconds to wait for the others when the run is to end
KILL = 30.0  # seconds after which who has not ended is killed; torchrun does the same
TOLD = (2, 3, 130)  # exit codes of errors that a process tells the others, unless it's interrupted before they have met


class Interrupted(Exception):
    """A signal asked the run to stop; a checkpoint has been written."""


class Lost(UserError):
    """Another process is dead."""


def launched() -> bool:
    """Whether torchrun, or `launch`, started this process."""
    return TORCHRUN in os.environ or STORE in os.environ


def world() -> int:
    """How many processes there are."""
    return int(os.environ["WORLD_SIZE"]) if launched() else 1


def rank() -> int:
    """The number of this process."""
    return int(os.environ["RANK"]) if launched() else 0


def local_rank() -> int:
    """The number of this process on its machine."""
    return int(os.environ["LOCAL_RANK"]) if launched() else 0


def torchrun() -> list[str]:
    """The launcher of this process as one would type it again; nothing if it wasn't torchrun."""
    if TORCHRUN not in os.environ:
        return []
    nodes, words = int(os.environ.get("GROUP_WORLD_SIZE", 1)), []
    if nodes > 1:
        words = [f"--nnodes={nodes}", f"--node-rank={os.environ['GROUP_RANK']}", f"--master-addr={os.environ['MASTER_ADDR']}",
                 f"--master-port={os.environ['MASTER_PORT']}"]
    return ["torchrun", *words, f"--nproc-per-node={os.environ['LOCAL_WORLD_SIZE']}"]


def on_each_gpu() -> int:
    """How many processes of this machine share a GPU with each other, at most."""
    import torch

    here = int(os.environ["LOCAL_WORLD_SIZE"]) if launched() else 1
    return math.ceil(here / max(1, torch.cuda.device_count()))


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def launch(processes: int, command: list[str]) -> int:
    """Run `command` as so many processes of this machine that share a run; returns the exit code of the first one.

    It's what torchrun does, without importing torch: a signal is passed on to all, and if one dies, the others are asked to
    stop, and killed if they don't. Of errors the code of the first is returned, 128 + the number of a signal that ended it.
    """
    team, asked = [], False

    def pass_on(number, frame=None):
        nonlocal asked
        asked = True
        for process in team:
            process.send_signal(signal.SIGTERM if number == hangup else number)

    hangup = getattr(signal, "SIGHUP", None)  # Windows has none
    heeds = bool(hangup) and signal.getsignal(hangup) != signal.SIG_IGN  # not under nohup
    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM, *[hangup] * heeds)}
    first, told, since = None, False, math.inf  # who ended with an error, whether the others know, when they have to act on it
    try:
        with tempfile.TemporaryDirectory() as private:  # what lies in the store is run by those who read it
            shared = os.environ | {STORE: f"{private}/store", LAUNCHER: str(os.getpid()), "WORLD_SIZE": str(processes),
                                   "LOCAL_WORLD_SIZE": str(processes)}
            shared.setdefault("OMP_NUM_THREADS", str(max(1, cores() // processes)))
            for number in map(str, range(processes)):
                if asked:
                    break
                # In a session of its own, or a terminal would send it Ctrl-C, too, and a second one stops without saving.
                team.append(subprocess.Popen(command, env=shared | {"RANK": number, "LOCAL_RANK": number},
                                             start_new_session=True))
            while any(process.poll() is None for process in team):
                if first is None:
                    first = next((number for number, process in enumerate(team) if process.poll()), None)
                    if first is not None:
                        told = team[first].returncode in TOLD
                        since = time.monotonic() + told * 2 * PATIENCE
                if time.monotonic() > since and not asked:  # a second signal would stop them without saving
                    pass_on(signal.SIGTERM)
                if time.monotonic() > since + KILL and not told:
                    pass_on(signal.SIGKILL)
                time.sleep(0.05)
    finally:
        pass_on(signal.SIGTERM)  # of those that an error here has left
        for number, handler in before.items():
            signal.signal(number, handler)
    code = team[first or 0].returncode
    killed = first if code < 0 else next((number for number, process in enumerate(team) if process.returncode < 0), None)
    if killed is not None:  # and could not say it
        name = signal.Signals(-team[killed].returncode).name
        print(f"Process {killed} of {processes} was ended by {name}; the run goes on with --resume.", file=sys.stderr)
    return 128 - code if code < 0 else code


@dataclass
class Team:
    """The processes of a run, as one of them sees them. The first, rank 0, owns the run folder."""

    rank: int = 0
    world: int = 1
    store: object = None  # a torch.distributed.Store
    stop: threading.Event = field(default_factory=threading.Event)  # set by a signal
    shares_batches: bool = False
    turn: int = 0  # how often the processes have met
    looked: float = 0.0
    settled: bool = False  # all know what the run ends with
    alone: bool = False  # others cannot or need not be waited for
    parent: int = field(default_factory=os.getppid)  # who started the processes

    @property
    def share(self) -> tuple[int, int]:
        """Which part of each batch is this process's, of how many."""
        return (self.rank, self.world) if self.shares_batches else (0, 1)

    def exchange(self, value=None) -> list:
        """Wait for all processes; what each of them brought, in the order of ranks. If one failed, all raise its error."""
        return [value] if self.world == 1 else self._meet((value, None))

    def tell(self, value=None):
        """The first process's value, on all."""
        return self.exchange(value if self.rank == 0 else None)[0]

    def _meet(self, outcome: tuple) -> list:
        """An outcome is a value or an error. The wait is in Python, so that signals get through."""
        keys, failed = [f"{self.turn}/{rank}" for rank in range(self.world)], outcome[1] is not None
        self.turn += 1
        self.store.set(keys[self.rank], pickle.dumps(outcome))
        ending = None
        while not self.store.check(keys):
            if failed or self._asked():
                ending = ending or time.monotonic()
                self.store.set("stop", "")
                if time.monotonic() - ending > PATIENCE:  # one of them is dead
                    self.alone = True
                    break
            time.sleep(0.02)
        outcomes = [pickle.loads(self.store.get(key)) if self.store.check([key]) else (None, Interrupted()) for key in keys]
        errors = sorted((error for _, error in outcomes if error), key=lambda error: isinstance(error, Interrupted))
        if errors:
            self.settled = True
            raise errors[0] from None
        return [value for value, _ in outcomes]

    def _asked(self) -> bool:
        """Whether the run is to stop: this process or another one got a signal or an error, or whoever started them is gone."""
        if self.store.check(["stop"]) or os.getppid() != self.parent:
            self.stop.set()
        return self.stop.is_set()

    @contextmanager
    def together(self):
        """An error that has a sentence for the user ends all processes with that sentence; only the first one prints."""
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere) if self.rank else nullcontext():
            try:
                yield
            except (UserError, OSError, Interrupted) as error:
                self.alone = self.alone or isinstance(error, Lost)
                if self.world > 1 and not self.settled and not self.alone:
                    self._meet((None, error))
                raise
            except BaseException:  # is told by a traceback, or was meant to stop at once
                self.alone = True
                if self.world > 1:
                    self.store.set("stop", "")
                raise

    def leave(self):
        """Wait until the first process has said its last word: torchrun ends it when another one ends with an error."""
        if self.world == 1 or self.alone:
            return
        if self.rank == 0:
            self.store.set("end", "")
        began = time.monotonic()
        while not self.store.check(["end"]) and time.monotonic() - began < PATIENCE:
            time.sleep(0.02)

    def stopping(self) -> bool:
        """Whether this process got a signal, or another one a signal or an error; called after each step."""
        if self.world > 1 and time.monotonic() - self.looked > LOOK:
            self.looked = time.monotonic()
            self._asked()
        if self.shares_batches:  # all stop at the same step, or those who go on would wait for the others
            import torch
            import torch.distributed as dist

            asked = torch.tensor(int(self.stop.is_set()))
            with _in_touch():
                dist.all_reduce(asked)
            return bool(asked)
        return self.stop.is_set()

    def in_turn(self, work: Callable):
        """Do `work` on the first process of each machine, then on the others, which find what it left in the file system."""
        first = local_rank() == 0
        done = work() if first else None
        self.exchange()
        return done if first else work()

    def take(self, numbers: range) -> Iterator[int]:
        """The trials that are this process's: whoever is free takes the next; where batches are shared, all take each."""
        if self.share[1] == self.world:
            yield from numbers
            return
        key = f"taken/{self.turn}"
        while (taken := self.store.add(key, 1) - 1) < len(numbers):
            yield numbers[taken]

    def ahead(self, trials: int) -> float:
        """How many trials are done in the time of one, if all take equally long."""
        return 1.0 if self.share[1] == self.world else trials / math.ceil(trials / self.world)

    def share_batches(self, device):
        """From now on each step's batch is one for all processes."""
        import torch
        import torch.distributed as dist

        self.shares_batches = True
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if not dist.is_initialized():
            with _in_touch():
                dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", rank=self.rank,
                                        world_size=self.world, store=dist.PrefixStore("tensors", self.store))


def join() -> Team:
    """The team that this process was started for; otherwise this process alone."""
    return _of_environment() if launched() else Team()


@functools.cache  # so that a second run in the same processes goes on counting turns
def _of_environment() -> Team:
    from torch.distributed import FileStore, PrefixStore
    from torch.distributed.rendezvous import rendezvous

    if STORE in os.environ:
        return Team(rank(), world(), FileStore(os.environ[STORE], world()), parent=int(os.environ[LAUNCHER]))
    store, number, size = next(rendezvous("env://"))
    return Team(number, size, PrefixStore(f"nevis_lite/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store))


@contextmanager
def _in_touch():
    """Messages fail when who should send or receive them is dead."""
    try:
        yield
    except RuntimeError as error:  # gloo and NCCL have no kind of their own for it
        what = (str(error).splitlines() or [type(error).__name__])[0]
        raise Lost(f"Another process of the run cannot be reached ({what}); go on with --resume.") from None


def add_up(tensors: list):
    """In place: the sum over all processes, in one message."""
    import torch
    import torch.distributed as dist

    flat = torch.cat([tensor.flatten() for tensor in tensors])
    with _in_touch():
        dist.all_reduce(flat)
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def join_rows(tensor):
    """The rows of all processes, in the order of ranks, on the CPU."""
    import torch
    import torch.distributed as dist

    tensor, parts = tensor.cpu(), [None] * dist.get_world_size()
    with _in_touch():
        dist.all_gather_object(parts, tensor)
    return torch.cat(parts)
