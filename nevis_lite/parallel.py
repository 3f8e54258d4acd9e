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
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, field

from nevis_lite.config import UserError

LAUNCH = "nevis_lite"  # the name of a run that `launch` started
LOOK = 1.0  # seconds between two looks at whether another process asks to stop
PATIENCE = 10.0  # seconds to wait for the others when the run is to end
KILL = 30.0  # seconds after which who has not ended is killed; torchrun does the same
ORDERLY = (0, 2, 3, 130)  # exit codes on which all processes agreed


class Interrupted(Exception):
    """A signal asked the run to stop; a checkpoint has been written."""


class Lost(UserError):
    """Another process is dead."""


def launched() -> bool:
    """Whether torchrun, or `launch`, started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


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
    if not launched() or os.environ["TORCHELASTIC_RUN_ID"] == LAUNCH:
        return []
    nodes, words = int(os.environ.get("GROUP_WORLD_SIZE", 1)), []
    if nodes > 1:
        words = [f"--nnodes={nodes}", f"--node-rank={os.environ['GROUP_RANK']}", f"--master-addr={os.environ['MASTER_ADDR']}",
                 f"--master-port={os.environ['MASTER_PORT']}"]
    return ["torchrun", *words, f"--nproc-per-node={os.environ['LOCAL_WORLD_SIZE']}"]


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def launch(processes: int, command: list[str]) -> int:
    """Run `command` as so many processes of this machine that share a run; returns the exit code of the first one.

    It's what torchrun does, without importing torch: a signal is passed on to all, and if one dies, the others are asked to
    stop, and killed if they don't. Of errors the code of the first is returned, 128 + the number of a signal that ended it.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"TORCHELASTIC_RUN_ID": LAUNCH, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
              "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes),
              "TORCH_CPP_LOG_LEVEL": "ERROR"}  # no stack traces of the store in C++ when the first process is killed
    # In a session of their own, or a terminal would send them Ctrl-C, too, and a second one stops without saving.
    team = [subprocess.Popen(command, env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                             start_new_session=True) for rank in range(processes)]

    def pass_on(number, frame=None):
        for process in team:
            if process.poll() is None:
                process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    first, since = None, math.inf  # who ended with an error, and when
    try:
        while any(process.poll() is None for process in team):
            if first is None:
                first = next((rank for rank, process in enumerate(team) if process.poll()), None)
                since = math.inf if first is None else time.monotonic()
                if first is not None and team[first].returncode not in ORDERLY:
                    pass_on(signal.SIGTERM)
            if time.monotonic() - since > KILL:
                pass_on(signal.SIGKILL)
            time.sleep(0.05)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    code = team[first or 0].returncode
    if code < 0:
        print(f"Process {first or 0} of {processes} was ended by {signal.Signals(-code).name}; the run goes on with --resume.",
              file=sys.stderr)
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
    gone: bool = False  # another process is, perhaps the one that kept the store
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
        if self._there():
            self.store.set(keys[self.rank], pickle.dumps(outcome))
        ending = None
        while not self._there(*keys):
            if self.gone:
                raise Interrupted
            if failed or self.stop.is_set():
                ending = ending or time.monotonic()
                self.store.set("stop", "")
                if time.monotonic() - ending > PATIENCE:  # one of them is dead
                    break
            time.sleep(0.02)
        outcomes = [pickle.loads(self.store.get(key)) if self._there(key) else (None, Interrupted()) for key in keys]
        errors = sorted((error for _, error in outcomes if error), key=lambda error: isinstance(error, Interrupted))
        if errors:
            self.settled = True
            raise errors[0] from None
        return [value for value, _ in outcomes]

    def _there(self, *keys: str) -> bool:
        """Whether the store has all of them. The run is to end where it is gone, or who started this process."""
        try:
            there = self.store.check(list(keys))
        except RuntimeError:  # of several kinds
            there, self.gone = False, True
        if self.gone or os.getppid() != self.parent:
            self.stop.set()
        return there

    @contextmanager
    def together(self):
        """An error that has a sentence for the user ends all processes with that sentence; only the first one prints."""
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere) if self.rank else nullcontext():
            try:
                yield
            except (UserError, OSError, Interrupted) as error:
                self.gone = self.gone or isinstance(error, Lost)
                if self.world > 1 and not self.settled and not self.gone:
                    self._meet((None, error))
                raise

    def leave(self):
        """The first process has said its last word when the others end, whose errors end it, too; and it keeps the store."""
        if self.world == 1 or self.gone:
            return
        others = [f"left/{rank}" for rank in range(1, self.world)]
        self.store.set("end", "") if self.rank == 0 else None
        began = time.monotonic()
        while not self._there(*(others if self.rank == 0 else ["end"])) and time.monotonic() - began < PATIENCE:
            if self.gone:
                return
            time.sleep(0.02)
        self.store.set(f"left/{self.rank}", "")

    def stopping(self) -> bool:
        """Whether this process got a signal, or another one a signal or an error; called after each step."""
        if self.world > 1 and time.monotonic() - self.looked > LOOK:
            self.looked = time.monotonic()
            if self._there("stop"):
                self.stop.set()
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
    from torch.distributed import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    store, rank, size = next(rendezvous("env://"))
    return Team(rank, size, PrefixStore(f"nevis_lite/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store))


@contextmanager
def _in_touch():
    """Messages fail when who should send or receive them is dead."""
    try:
        yield
    except RuntimeError:  # gloo and NCCL have no kind of their own for it
        raise Lost("Another process of the run has ended; go on with --resume.") from None


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

    parts = [None] * dist.get_world_size()
    with _in_touch():
        dist.all_gather_object(parts, tensor.cpu())
    return torch.cat(parts)
