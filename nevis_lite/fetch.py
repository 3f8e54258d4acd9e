"""Published files onto the disk: fetched where a plain address gives them, else with a word on what to do by hand.

A file gets its final name only when it is whole and has the known checksum. What is on its way is called `.NAME.part`, is
ignored by all readers, and is gone on with later. Names come from the catalogue, never from a server.
"""

from __future__ import annotations

import errno
import hashlib
import http.client
import os
import shutil
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import quote
from urllib.request import Request, urlopen

from tqdm import tqdm

from nevis_lite import datasets
from nevis_lite.config import MissingData
from nevis_lite.datasets import DataSet

TIMEOUT = 60.0  # seconds without an answer or a byte
WAITS = (1, 4, 15)  # seconds before another try of the same address, when none brought anything new
BUSY = (408, 425, 429, 500, 502, 503, 504)  # HTTP answers that may be others a little later
SMALL = 50_000  # bytes; a wrong file below is rather a message than a new edition of the file
PAGES = (b"<!doctype", b"<html", b"<head", b"<script", b"<!--")


class FetchError(MissingData):
    """A file that no address gives; says why, as `reason` alone does, and what to do by hand."""

    def __init__(self, words: str, reason: str):
        super().__init__(words)
        self.reason = reason


class _Failed(Exception):
    """This address does not give the file."""


# ---------------------------------------------------------------------------------------------------------------------
# What is there


def absent(dataset: DataSet) -> list[dict]:
    """The published files that a data set lacks; one that is `instead_of` another is asked for in no case.

    None are asked for where the user's own class folders or IDX files take their place, or folders that may be what somebody
    unpacked under a name of their own.
    """
    there = {file.get("instead_of", file["name"]) for file in dataset.files if datasets.is_there(dataset.folder, file["name"])}
    lacking = [file for file in dataset.files if "instead_of" not in file and file["name"] not in there]
    if not there and not datasets.is_missing(dataset):
        unpacked = any(path.is_dir() and not datasets.is_litter(path.name) for path in dataset.folder.iterdir())
        return [] if unpacked or datasets.own_layout(dataset) else lacking
    return lacking


def is_manual(file: dict) -> bool:
    """True when no plain address gives the file."""
    return not _addresses(file)


def _addresses(file: dict) -> list[str]:
    """Where a file can be fetched; the `url` of a manual one is but a page for people."""
    return ([] if "manual" in file or "url" not in file else [file["url"]]) + file.get("mirrors", [])


def by_hand(files: list[dict], folder: Path) -> str:
    """What to do about files that cannot be fetched: the folder, then each source with the exact names of its files."""
    sources = {}
    for file in files:
        words, page = file.get("manual", ""), file.get("url", "")
        how = f"{words} ({page})" if words and page and page not in words else words or page
        sources.setdefault(how, []).append(file["name"])
    lines = [f"  {', '.join(names)}: {how}" for how, names in sources.items()]
    return "\n".join([f"by hand, into {folder.absolute()}:", *lines])


def mismatch(path: Path, file: dict) -> str | None:
    """How a file differs from the known checksum; None if it doesn't, or if none is known."""
    kind = next((kind for kind in ("sha256", "md5") if kind in file), None)
    if kind is None:
        return None
    digest = hashlib.new(kind)
    with open(path, "rb") as content:
        while block := content.read(1 << 22):
            digest.update(block)
    return None if digest.hexdigest() == str(file[kind]).lower() else f"{kind} {digest.hexdigest()} in place of {file[kind]}"


def few(files: list[dict]) -> str:
    """The first names, and how many more."""
    names = [file["name"] for file in files]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def size_text(count: int) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


# ---------------------------------------------------------------------------------------------------------------------
# Getting it


def link(file: dict, dataset: DataSet, raw: Path, unique: bool, report: Callable = print) -> bool:
    """Link (else copy) a file that already lies in `raw`/key or in `raw` itself; True if there is one.

    Data sets share names such as images.tar, so a file of `raw` itself must have the known checksum, or, where none is known,
    a name that is `unique` in the catalogue.
    """
    here, target = raw / dataset.key / file["name"], dataset.folder / file["name"]
    if not here.is_file():
        here = raw / file["name"]
        if not here.is_file():
            return False
        known = "sha256" in file or "md5" in file
        if known and (problem := mismatch(here, file)):
            report(f"{here} is not taken ({problem}); if it is the right file, move it to {raw / dataset.key}.")
            return False
        if not known and not unique:
            return False
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)  # a link that leads nowhere
    try:
        target.symlink_to(here.absolute())
    except OSError:  # a file system without links
        part = _part(target)
        shutil.copyfile(here, part)
        os.replace(part, target)
    return True


def fetch(file: dict, folder: Path, report: Callable = print, sleep: Callable = time.sleep,
          accept_new_checksum: bool = False, hosts: dict[str, str] | None = None) -> Path:
    """The path in `folder` of `file`, an entry's {name, url, md5 or sha256, mirrors, manual}, fetched if it isn't there yet.

    Its addresses are tried in turn, each again after a wait while the network fails, going on where the last try stopped.
    Calls that share `hosts` {host: why it was given up, "" if it answered} do not wait for the same one twice. FetchError when
    none gives the file.
    """
    hosts = {} if hosts is None else hosts
    target = folder / file["name"]
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    reasons = []
    for url in _addresses(file):
        try:
            _get(url, _part(target), file, report, sleep, accept_new_checksum, hosts)
        except _Failed as error:
            reasons.append(f"{_host(url) or url}: {error}")
        else:
            os.replace(_part(target), target)
            return target
    reason = "; ".join(reasons)
    tried = f"{file['name']} cannot be fetched ({reason}).\n" if reason else ""
    raise FetchError(tried + by_hand([file], folder), reason)


def _host(url: str) -> str:
    return url.partition("//")[2].partition("/")[0]


def _part(target: Path) -> Path:
    return target.with_name(f".{target.name}.part")


def _get(url: str, part: Path, file: dict, report: Callable, sleep: Callable, accept: bool, hosts: dict[str, str]):
    """Fetch one address into `part` and check it; _Failed, with `part` gone, if it isn't the file."""
    resumed = part.exists()
    _download(url, part, file["name"], sleep, hosts)
    problem = mismatch(part, file)
    if problem and resumed:  # what an earlier call left may be of another edition
        part.unlink()
        _download(url, part, file["name"], sleep, hosts)
        problem = mismatch(part, file)
    if not problem:
        return
    size = part.stat().st_size
    if accept and size >= SMALL:
        report(f"{file['name']}: taken with {problem}")
        return
    part.unlink()
    if size < SMALL:
        raise _Failed(f"it sent only {size_text(size)}, which is not the file: {problem}")
    raise _Failed(f"it sent {size_text(size)} with {problem}; the file may have been packed anew, and if you trust it, "
                  "--accept-new-checksum takes it")


def _download(url: str, part: Path, name: str, sleep: Callable, hosts: dict[str, str]):
    """Bring `part` to the length that the server tells; _Failed when it refuses or the network keeps failing."""
    tries, longest, host = 0, 0, _host(url)
    if hosts.get(host):
        raise _Failed(hosts[host])
    while True:
        waits = WAITS
        try:
            _transfer(url, part, name)
            hosts[host] = ""
            return
        except HTTPError as error:
            error.close()
            hosts[host] = ""
            if error.code == 416:  # nothing follows what is there: it is the whole file, or another one
                if error.headers.get("Content-Range") == f"bytes */{part.stat().st_size}":
                    return
                part.unlink()
            elif error.code in (401, 403):
                raise _Failed(f"it refused (HTTP {error.code}) and may want a login or rules to be accepted") from None
            elif error.code not in BUSY:
                raise _Failed(f"HTTP {error.code} {error.reason}") from None
            reason = f"HTTP {error.code} {error.reason}"
        except ValueError as error:  # no address at all
            raise _Failed(str(error)) from None
        except (OSError, http.client.HTTPException) as error:
            cause = getattr(error, "reason", error)
            if isinstance(cause, ssl.SSLCertVerificationError):
                raise _Failed(f"its certificate is not valid ({cause.verify_message})") from None
            if getattr(cause, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
                raise  # it is our disk that fails
            if isinstance(error, URLError) and host not in hosts:  # never reached: no host may be, so be quick about it
                waits = () if any(hosts.values()) else WAITS[:1]
            reason = str(cause) or type(cause).__name__
        size = part.stat().st_size if part.exists() else 0
        if size > longest:
            tries, longest = 0, size
        if tries >= len(waits):
            hosts[host] = reason
            raise _Failed(reason)
        sleep(waits[tries])
        tries += 1


def _transfer(url: str, part: Path, name: str):
    """One request, going on at the end of `part` if the server can; ConnectionError when less came than it told."""
    size = part.stat().st_size if part.exists() else 0
    request = Request(quote(url, safe="%/:=&?~#+!$,;'@()*[]"),
                      headers={"User-Agent": "nevis_lite", "Accept-Encoding": "identity"})
    if size:
        request.add_header("Range", f"bytes={size}-")
    with urlopen(request, timeout=TIMEOUT) as answer:
        if size and answer.status == 206 and not answer.headers.get("Content-Range", "").startswith(f"bytes {size}-"):
            part.unlink()  # the next try asks for all of it
            raise ConnectionError("it sent another part than was asked for")
        if answer.status != 206:
            size = 0  # the server sends it all again
        length = answer.headers.get("Content-Length", "")
        total = size + int(length) if length.isdigit() else None
        block = answer.read(1 << 16)
        if not size and block.lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith(PAGES):
            part.unlink(missing_ok=True)
            raise _Failed("it sent a web page, perhaps a login, a quota or a warning of viruses, in place of the file")
        with (open(part, "ab" if size else "wb") as file,
              tqdm(total=total, initial=size, desc=name, unit="B", unit_scale=True, disable=None, leave=False) as bar):
            while block:
                file.write(block)
                size += len(block)
                bar.update(len(block))
                block = answer.read(1 << 16)
    if total is not None and size < total:
        raise ConnectionError(f"the connection broke after {size_text(size)} of {size_text(total)}")
    if not size:
        raise ConnectionError("it sent nothing")
