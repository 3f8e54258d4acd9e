"""The published files of a data set as one tree of names: archives are looked into, never unpacked into folders.

`Raw(folder)` lists 'photos.zip/a/1.jpg' for a member of photos.zip, and 'a/1.jpg' for a file that lies in the folder itself, so
that patterns which begin at a '/' fit both an archive and what somebody unpacked from it. Members are read by name and held in
memory: nothing that an archive says is ever used as a path on disk, and links lead nowhere but into archives.
"""

from __future__ import annotations

import bz2
import gzip
import itertools
import lzma
import os
import posixpath
import re
import shutil
import struct
import subprocess
import tarfile
import tempfile
import weakref
import zipfile
import zlib
from contextlib import ExitStack
from pathlib import Path

from nevis_lite.config import UserError

ARCHIVES = (".zip", ".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.z", ".rar")
ARCHIVE = re.compile(f"({'|'.join(map(re.escape, ARCHIVES))})$", re.IGNORECASE)
DEEPEST = 5  # archives within archives; an archive may hold itself
LARGEST_MEMBER = 4 << 30  # a member that claims more is refused
HIGHEST_RATIO = 800  # of unpacked to packed size, above 256 MB: that is a bomb (deflate can reach 1030), not data
DAMAGED = (zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, struct.error, EOFError, RuntimeError, ValueError)
# Programs that read RAR, each with its options. bsdtar is last, since it gives some copies of a file as empty files.
UNRAR = {"unrar": "x -idq -o+ {archive} {target}/", "7zz": "x -y -o{target} {archive}", "7z": "x -y -o{target} {archive}",
         "unar": "-quiet -no-directory -output-directory {target} {archive}", "bsdtar": "-xf {archive} -C {target}"}


class Raw:
    """Names and contents of all files below `folder`; `scratch` takes decompressed tar files while the object lives."""

    def __init__(self, folder: Path, scratch: Path | None = None):
        self.folder = Path(folder)
        self._resources = ExitStack()
        self.close = weakref.finalize(self, self._resources.close)  # at the latest when the object is gone
        place = tempfile.TemporaryDirectory(prefix="nevis_lite-", dir=scratch)
        self._scratch = Path(self._resources.enter_context(place)).absolute()
        self._count = itertools.count()
        self._loose = {}  # name -> its path below the folder, which differs where the name isn't UTF-8
        self._where = {}  # name -> str: such a path; Path: in scratch; (function, *arguments): what reads an archive's member
        self._links = {}  # name -> (archive, path) for a link in a tar whose file lies elsewhere
        for root, folders, files in os.walk(self.folder, followlinks=True):
            folders[:] = sorted(name for name in folders if not is_litter(name))
            for file in sorted(files):
                if not is_litter(file):
                    path = Path(root, file).relative_to(self.folder).as_posix()
                    self._loose[legible(path)] = path
        for name, path in self._loose.items():
            if ARCHIVE.search(name):
                self._add_archive(name, self.folder / path)
            else:
                self._where[name] = path
        self._follow_links()
        self.names = list(self._where)

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def read(self, name: str) -> bytes:
        """A file's bytes. OSError when they are damaged, KeyError for an unknown name."""
        where = self._where[name]
        try:
            if isinstance(where, (str, Path)):
                return (self.folder / where).read_bytes()
            return where[0](*where[1:])
        except DAMAGED as error:
            raise OSError(f"{name}: {error}") from None

    def text(self, name: str) -> str:
        """A text file in UTF-8, or else in Latin-1, which fits any bytes; line ends become a newline."""
        content = self.read(name)
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError:
            text = content.decode("latin-1")
        return text.replace("\r\n", "\n").replace("\r", "\n")

    def _add_archive(self, name: str, path: Path):
        """Index the members of an archive of the disk; in messages it goes by its name."""
        shown, kind = self.folder / name, Path(name).suffix.lower()
        try:
            if kind == ".zip":
                self._add_zip(name, path)
            elif kind == ".rar":
                self._add_folder(name, self._unrar(shown, path))
            else:
                self._add_tar(name, self._plain_tar(shown, path))
        except (*DAMAGED, OSError) as error:
            if getattr(error, "errno", None):  # the disk's trouble, not the archive's
                raise UserError(f"{shown}: cannot be read ({error.strerror}).") from None
            raise UserError(f"{shown}: not a whole archive ({error}){_page(path)}; fetch it again.") from None

    def _add_member(self, archive: str, inner: str, where: tuple | Path, size: int):
        """Index a member, looking into it if it's an archive itself.

        What somebody unpacked beside the archive, or into a folder of the archive's name, isn't listed twice.
        """
        for place in (posixpath.dirname(archive), ARCHIVE.sub("", archive)):
            loose = self._loose.get(posixpath.join(place, inner))
            if loose and (self.folder / loose).stat().st_size == size:
                return
        name = f"{archive}/{inner}"
        self._where[name] = where
        if ARCHIVE.search(name) and size and sum(1 for part in name.split("/") if ARCHIVE.search(part)) <= DEEPEST:
            copy = where
            if not isinstance(where, Path):
                copy = self._new(name)
                copy.write_bytes(self.read(name))
            del self._where[name]
            self._add_archive(name, copy)

    def _add_zip(self, name: str, path: Path):
        file = self._resources.enter_context(open(path, "rb"))
        archive = zipfile.ZipFile(file)
        members = {_zip_name(member): member for member in archive.infolist() if not member.is_dir()}
        for inner, member in sorted(members.items()):
            if not is_litter(inner):
                self._refuse(name, inner, member.file_size, min(LARGEST_MEMBER, _most(member.compress_size)))
                where = archive.read, member
                if member.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) and not member.flag_bits & 1:  # encrypted
                    where = (_read_zipped, file.fileno(), member.compress_size, member.header_offset,
                             member.file_size, member.compress_type, member.CRC)
                self._add_member(name, inner, where, member.file_size)

    def _add_tar(self, name: str, path: Path):
        file = self._resources.enter_context(open(path, "rb"))
        self._add_tar_at(name, file, 0)

    def _add_tar_at(self, name: str, file, begin: int):
        """Index a tar that begins somewhere in an open file; the places of its members count from the start of the file."""
        handle = file.fileno()
        file.seek(begin)
        with tarfile.open(fileobj=file, mode="r:", encoding="utf-8", errors="surrogateescape") as archive:
            files, links = {}, {}  # name -> (size, offset); name -> target
            for member in archive:
                archive.members.clear()  # where it would keep them all
                if is_litter(member.name):
                    continue
                inner = _tar_name(member.name)
                files.pop(inner, None), links.pop(inner, None)  # of several members of a name the last one counts
                if member.isreg():
                    files[inner] = member.size, member.offset_data
                elif member.islnk() or member.issym():  # a link counts as the file that it leads to
                    links[inner] = _target(member)
            end = os.pread(handle, 512, archive.offset)
        if end.strip(b"\0") or 0 < len(end) < 512:  # zeros, or nothing at all
            raise EOFError("it breaks off or is damaged")
        for inner, target in links.items():
            seen = set()
            while target in links and target not in seen:  # a chain; a circle ends nowhere
                seen.add(target)
                target = links[target]
            if target in files:
                files[inner] = files[target]
            else:
                self._links[f"{name}/{inner}"] = (name, target)
        for inner, (size, offset) in sorted(files.items()):
            self._refuse(name, inner, size, LARGEST_MEMBER)
            if inner.lower().endswith(".tar") and os.pread(handle, 5, offset + 257) == b"ustar":
                self._add_tar_at(f"{name}/{inner}", file, offset)  # in place: ImageNet's 1000 tars are 138 GB
            else:
                self._add_member(name, inner, (_read_at, handle, size, offset), size)

    def _refuse(self, archive: str, inner: str, size: int, most: int):
        if size > most:
            raise UserError(f"{self.folder / archive}: {inner} would unpack to {size >> 20} MB; refused.")

    def _follow_links(self):
        """A link out of its archive is the one file, in the archives beside it, whose path ends most alike, by two parts at
        least: some data sets come as one tree of folders cut into several archives."""
        names, found = {}, {}
        for name in self._where if self._links else ():
            names.setdefault(posixpath.basename(name), []).append(name)
        for link, (archive, target) in self._links.items():
            beside = [name for name in names.get(posixpath.basename(target), ())
                      if name.startswith(posixpath.join(posixpath.dirname(archive), ""))]
            (second, _), (best, name) = [(1, ""), (1, ""), *sorted((_common_end(name, target), name) for name in beside)][-2:]
            if best > second:
                found[link] = self._where[name]
        self._where |= found

    def _new(self, name: str) -> Path:
        """A new path in scratch; of the name nothing but the ending is used."""
        return self._scratch / f"{next(self._count)}{Path(name).suffix}"

    def _plain_tar(self, shown: Path, path: Path) -> Path:
        """The archive itself, or a decompressed copy in scratch, whatever its ending says."""
        with open(path, "rb") as file:
            magic = file.read(2)
        openers = {b"\x1f\x8b": gzip.open, b"BZ": bz2.open, b"\xfd7": lzma.open}
        if magic in openers:
            with openers[magic](path) as packed:
                return self._copy(shown, path, packed)
        if magic != b"\x1f\x9d":
            return path
        if not shutil.which("gzip"):
            raise UserError(f"{shown}: needs the program gzip; install it and try again.")
        with open(path, "rb") as file, subprocess.Popen(["gzip", "-dc"], stdin=file, stdout=subprocess.PIPE,
                                                        stderr=subprocess.DEVNULL) as gunzip:
            plain = self._copy(shown, path, gunzip.stdout)
        if gunzip.returncode not in (0, 2):  # 2: a warning
            raise EOFError("gzip cannot read it")
        return plain

    def _copy(self, shown: Path, path: Path, packed) -> Path:
        plain, most = self._new(""), _most(path.stat().st_size)
        with open(plain, "wb") as file:
            while block := packed.read(1 << 22):
                file.write(block)
                if file.tell() > most:
                    raise UserError(f"{shown}: would unpack to more than {most >> 20} MB; refused.")
        return plain

    def _unrar(self, shown: Path, path: Path) -> Path:
        """RAR has no reader in Python: the first of some programs that can unpacks it into scratch."""
        tried = []
        for name, options in UNRAR.items():
            if shutil.which(name):
                target = self._new("")  # a new one for each, since what fails leaves halves of files behind
                target.mkdir()
                command = [name, *(option.format(archive=path, target=target) for option in options.split())]
                silent = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
                if subprocess.run(command, **silent).returncode == 0:
                    return target
                tried.append(name)
        if tried:
            raise EOFError(f"{' and '.join(tried)} cannot read it{'' if 'unar' in tried else ', but unar may'}")
        raise UserError(f"{shown}: needs a program that reads RAR archives (unar, unrar, 7-Zip or bsdtar); install one and try "
                        "again.")

    def _add_folder(self, name: str, folder: Path):
        inside = folder.resolve()
        for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.resolve().is_relative_to(inside)):
            inner = legible(path.relative_to(folder).as_posix())
            if not is_litter(inner):
                self._add_member(name, inner, path, path.stat().st_size)


def is_litter(name: str) -> bool:
    """What operating systems and editors leave behind, anywhere in a path."""
    return any(part.startswith((".", "__MACOSX")) and part not in (".", "..") or part.lower() in ("thumbs.db", "desktop.ini")
               for part in name.split("/"))


def _most(packed: int) -> int:
    return max(256 << 20, HIGHEST_RATIO * packed)


def _read_at(handle: int, size: int, offset: int) -> bytes:
    parts = []
    while size:
        part = os.pread(handle, size, offset)  # 2 GB at most
        if not part:
            raise EOFError("the archive breaks off")
        parts.append(part)
        size, offset = size - len(part), offset + len(part)
    return b"".join(parts)


def _read_zipped(handle: int, packed: int, offset: int, size: int, kind: int, crc: int) -> bytes:
    """A member of a zip, as zipfile reads it but for its one file position, for which threads would wait."""
    lengths = struct.unpack("<26x2H", os.pread(handle, 30, offset))  # of the name and of the extra field before the content
    content = _read_at(handle, packed, offset + 30 + sum(lengths))
    if kind == zipfile.ZIP_DEFLATED:
        content = zlib.decompressobj(-zlib.MAX_WBITS).decompress(content, max(1, size))  # no more than it claims to be
    if zlib.crc32(content) != crc:
        raise zipfile.BadZipFile("bad CRC-32")
    return content


def legible(name: str) -> str:
    """A name whose bytes aren't UTF-8 as Latin-1, so that it can be printed and written to files."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return name.encode("utf-8", "surrogateescape").decode("latin-1")
    return name


def _zip_name(member: zipfile.ZipInfo) -> str:
    """Some programs write UTF-8 without marking it, which then reads as CP437, and some a backslash between folders."""
    name = member.filename
    if not member.flag_bits & 0x800:
        try:
            name = name.encode("cp437").decode("utf-8")
        except UnicodeError:
            pass
    return name.replace("\\", "/").lstrip("/")


def _tar_name(name: str) -> str:
    return legible(posixpath.normpath(name).lstrip("/"))


def _target(member: tarfile.TarInfo) -> str:
    """A hard link is relative to the archive, a symbolic one to its folder."""
    return _tar_name(posixpath.join("" if member.islnk() else posixpath.dirname(member.name), member.linkname))


def _common_end(name: str, other: str) -> int:
    """How many parts at their ends two paths share."""
    pairs = zip(reversed(name.split("/")), reversed(other.split("/")), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _page(path: Path) -> str:
    """Says so when a server sent a web page in place of the file."""
    with open(path, "rb") as file:
        start = file.read(512).lstrip().lower()
    return ": it is a web page, so the server refused or wanted a login" if start.startswith((b"<!doctype", b"<html")) else ""
