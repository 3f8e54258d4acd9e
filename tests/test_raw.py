import io
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import real_rar
from published import tarred, write, zipped
from published_names2 import compressed

from nevis_lite import raw as module
from nevis_lite.config import UserError
from nevis_lite.raw import Raw

FILES = {"a/1.jpg": b"one", "a/b c/2.JPG": b"two", "3.txt": b"three"}
PAGE = "<!DOCTYPE html><html><body>Sign in</body></html>" * 100


def contents(raw: Raw) -> dict:
    return {name: raw.read(name) for name in raw.names}


def packed(archive: str, files: dict = FILES) -> bytes:
    kind = archive.lower().rsplit(".", 1)[1]
    if kind == "zip":
        return zipped(files)
    return compressed(tarred(files)) if kind == "z" else tarred(files, {"tar": "", "tgz": "gz"}.get(kind, kind))


ARCHIVES = ["x.zip", "X.ZIP", "x.tar", "x.tgz", "x.tar.gz", "x.tar.bz2", "x.tar.xz", "x.tar.Z"]


@pytest.mark.parametrize("archive", ARCHIVES)
def test_members_have_the_names_that_they_would_have_unpacked(tmp_path, archive):
    write(tmp_path, {f"packed/{archive}": packed(archive)} | {f"loose/{name}": content for name, content in FILES.items()})
    raw, loose = Raw(tmp_path / "packed"), Raw(tmp_path / "loose")
    assert contents(raw) == {f"{archive}/{name}": content for name, content in FILES.items()}
    assert contents(loose) == FILES
    assert f"{archive}/3.txt" in raw and "3.txt" not in raw and archive not in raw
    assert raw.text(f"{archive}/3.txt") == "three"
    with pytest.raises(KeyError):
        raw.read("3.txt")


def test_the_ending_does_not_decide_how_a_tar_is_compressed(tmp_path):
    write(tmp_path, {"a.tar": tarred(FILES, "gz"), "b.tar.gz": tarred(FILES), "c.tgz": tarred(FILES, "bz2")})
    assert len(Raw(tmp_path).names) == 9


def test_archives_in_archives_are_looked_into(tmp_path):
    inner = tarred({"deep/x.jpg": "x"}, "gz")
    write(tmp_path, {"outer.zip": zipped({"in/inner.tar.gz": inner, "in/next.zip": zipped({"y.jpg": "y"}), "in/none.zip": ""}),
                     "outer.tar": tarred({"inner.tgz": inner})})
    assert contents(Raw(tmp_path)) == {"outer.zip/in/inner.tar.gz/deep/x.jpg": b"x", "outer.zip/in/next.zip/y.jpg": b"y",
                                       "outer.zip/in/none.zip": b"", "outer.tar/inner.tgz/deep/x.jpg": b"x"}


def test_not_without_end(tmp_path):
    content = b"core"
    for _ in range(20):
        content = zipped({"again.zip": content})
    write(tmp_path, {"x.zip": content})
    assert len(Raw(tmp_path).names) == 1


def test_what_somebody_unpacked_beside_the_archive_counts_once(tmp_path):
    for place in ("", "x/"):
        folder = tmp_path / f"at{place}"
        write(folder, {"x.zip": zipped(FILES), f"{place}a/1.jpg": b"one", f"{place}3.txt": b"another"})
        assert set(Raw(folder).names) == {"x.zip/a/b c/2.JPG", "x.zip/3.txt", f"{place}a/1.jpg", f"{place}3.txt"}


def test_names_are_only_names(tmp_path):
    names = {"../../up.jpg": "1", "/etc/root.jpg": "2", "a/../b/./flat.jpg": "3"}
    write(tmp_path / "in", {"x.zip": zipped(names), "x.tar": tarred(names)})
    before = sorted(tmp_path.rglob("*"))
    raw = Raw(tmp_path / "in")
    found = contents(raw)
    assert sorted(found.values()) == [b"1", b"1", b"2", b"2", b"3", b"3"]
    assert {"x.tar/etc/root.jpg", "x.zip/etc/root.jpg", "x.tar/b/flat.jpg"} <= set(found)
    assert sorted(tmp_path.rglob("*")) == before


def test_inner_archives_with_names_that_lead_elsewhere_stay_in_scratch(tmp_path):
    inner = zipped({"x.jpg": "x"})
    write(tmp_path / "in", {"x.zip": zipped({"../../up.zip": inner, "/tmp/root.zip": inner}),
                            "x.tar": tarred({"../up.zip": inner})})
    (tmp_path / "scratch").mkdir()
    raw = Raw(tmp_path / "in", tmp_path / "scratch")
    assert set(contents(raw).values()) == {b"x"} and len(raw.names) == 3
    assert not (tmp_path / "up.zip").exists()
    raw.close()
    assert not list((tmp_path / "scratch").iterdir())


def test_scratch_and_open_files_go_with_the_object(tmp_path):
    write(tmp_path / "in", {"x.tar.gz": tarred(FILES, "gz"), "y.tar": tarred(FILES), "z.zip": zipped(FILES)})
    (tmp_path / "scratch").mkdir()
    before = len(os.listdir("/proc/self/fd"))
    raw = Raw(tmp_path / "in", tmp_path / "scratch")
    assert len(os.listdir("/proc/self/fd")) == before + 3
    del raw
    assert not list((tmp_path / "scratch").iterdir())
    assert len(os.listdir("/proc/self/fd")) == before


def test_links_lead_to_files_of_the_archive_and_nowhere_else(tmp_path):
    secret = tmp_path / "secret.jpg"
    secret.write_text("secret")
    soft = {"z/chain": "one", "z/one": "../a/1.jpg", "z/away": str(secret), "z/up": "../../../secret.jpg", "z/none": "no.jpg",
            "z/circle": "../z/round", "z/round": "../z/circle", "z/folder": "../a"}
    write(tmp_path / "in", {"soft.tar": tarred(FILES, links=soft), "hard.tar": tarred(FILES)})
    with tarfile.open(tmp_path / "in/hard.tar", "a") as archive:
        for name, target in (("z/one", "a/1.jpg"), ("z/none", "1.jpg")):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.LNKTYPE, target
            archive.addfile(member)
    extra = {name: content for name, content in contents(Raw(tmp_path / "in")).items() if "/z/" in name}
    assert extra == dict.fromkeys(("soft.tar/z/one", "soft.tar/z/chain", "hard.tar/z/one"), b"one")


def test_links_lead_into_the_archives_beside_theirs(tmp_path):
    links = {"tree/x": "../flat/big/x", "tree/y": "/home/me/set/flat/big/y", "tree/z": "../other/z"}
    large = {"set/flat/big/x": "big x", "set/flat/big/y": "big y", "z": "no", "flat/small/y": "no"}
    write(tmp_path, {"set/a.tar": tarred({}, links=links), "set/b.tar": tarred(large),
                     "set/c.tar": tarred({"flat/small/x": "no"}), "set2/d.tar": tarred({"flat/big/x": "elsewhere"})})
    found = contents(Raw(tmp_path))
    assert found["set/a.tar/tree/x"] == b"big x" and found["set/a.tar/tree/y"] == b"big y"
    assert "set/a.tar/tree/z" not in found  # a name alone is too little


def test_what_is_equally_alike_is_no_target(tmp_path):
    write(tmp_path, {"a.tar": tarred({}, links={"x": "one/flat/x"}), "b.tar": tarred({"flat/x": "b"}),
                     "c.tar": tarred({"flat/x": "c"})})
    assert "a.tar/x" not in Raw(tmp_path)


def test_litter_is_ignored(tmp_path):
    litter = ["__MACOSX/a/._1.jpg", "a/.DS_Store", "a/._1.jpg", ".git/x.jpg", "a/Thumbs.db", "a/thumbs.db", "desktop.ini"]
    members = dict.fromkeys(litter, "x") | {"a/1.jpg": "one"}
    write(tmp_path, {"x.zip": zipped(members), "x.tar": tarred(members)} | {f"loose/{name}": "x" for name in members})
    assert sorted(Raw(tmp_path).names) == ["loose/a/1.jpg", "x.tar/a/1.jpg", "x.zip/a/1.jpg"]


@pytest.mark.parametrize("kind", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_threads_may_read_one_zip(tmp_path, kind):
    wanted = {f"x.zip/{number}": bytes([number]) * number * 100 for number in range(250)}
    with zipfile.ZipFile(tmp_path / "x.zip", "w", kind) as archive:
        for name, content in wanted.items():
            member = zipfile.ZipInfo(name.removeprefix("x.zip/"))
            member.extra = struct.pack("<HH", 0x9999, 5) + b"extra"
            archive.writestr(member, content, kind)
    raw = Raw(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        assert dict(zip(wanted, pool.map(raw.read, wanted), strict=True)) == wanted


def test_a_zip_member_that_is_larger_than_it_claims_is_an_os_error(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.jpg", b"A" * 5000)
    content = (tmp_path / "x.zip").read_bytes()
    assert content.count(struct.pack("<I", 5000)) == 2
    (tmp_path / "x.zip").write_bytes(content.replace(struct.pack("<I", 5000), struct.pack("<I", 50)))
    with pytest.raises(OSError, match="x.zip/a.jpg.*CRC"):
        Raw(tmp_path).read("x.zip/a.jpg")


def test_of_several_members_of_a_name_the_last_one_counts(tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        for name, content in (("a", "old"), ("b", "old"), ("c", "kept"), ("a", "new"), ("b", None), ("d", None), ("d", "new")):
            member = tarfile.TarInfo(name)
            if content is None:
                member.type, member.linkname = tarfile.SYMTYPE, "c"
            member.size = len(content or "")
            archive.addfile(member, io.BytesIO((content or "").encode()))
    assert contents(Raw(tmp_path)) == {"x.tar/a": b"new", "x.tar/b": b"kept", "x.tar/c": b"kept", "x.tar/d": b"new"}


def zip_of(name: bytes, marked: bool, content=b"x") -> bytes:
    """A zip whose one member has a name of these bytes, marked as UTF-8 or not."""
    flags, sizes = 0x800 * marked, (zlib.crc32(content), len(content), len(content), len(name))
    local = struct.pack("<4sHHHHHIIIHH", b"PK\3\4", 20, flags, 0, 0, 33, *sizes, 0) + name + content
    central = struct.pack("<4sHHHHHHIIIHHHHHII", b"PK\1\2", 20, 20, flags, 0, 0, 33, *sizes, 0, 0, 0, 0, 0, 0) + name
    return local + central + struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 1, 1, len(central), len(local), 0)


@pytest.mark.parametrize(("name", "shown"), [
    ("bär/1.jpg".encode("cp437"), "bär/1.jpg"), ("bär/1.jpg".encode(), "bär/1.jpg"),
    ("中文/1.jpg".encode("gb2312"), "╓╨╬─/1.jpg"), ("中文/1.jpg".encode(), "中文/1.jpg"), (b"a\\1.jpg", "a/1.jpg")])
def test_names_of_zip_members_in_old_code_pages(tmp_path, name, shown):
    write(tmp_path, {"x.zip": zip_of(name, marked=False)})
    assert contents(Raw(tmp_path)) == {f"x.zip/{shown}": b"x"}


@pytest.mark.parametrize(("name", "shown"), [
    ("bär/1.jpg".encode("latin-1"), "bär/1.jpg"), ("bär/1.jpg".encode(), "bär/1.jpg"),
    ("中文/1.jpg".encode("gb2312"), "ÖÐÎÄ/1.jpg"), ("中文/1.jpg".encode(), "中文/1.jpg")])
def test_names_that_are_not_utf8_can_be_printed_in_tars_and_folders(tmp_path, name, shown):
    write(tmp_path / "in", {"x.tar": tarred({os.fsdecode(name): "x"})})
    loose = os.path.join(os.fsencode(tmp_path), b"in", name)
    os.makedirs(os.path.dirname(loose))
    with open(loose, "wb") as file:
        file.write(b"loose")
    found = contents(Raw(tmp_path / "in"))
    assert found == {f"x.tar/{shown}": b"x", shown: b"loose"}
    assert "".join(found).encode()


def test_a_text_is_utf8_or_latin1(tmp_path):
    write(tmp_path, {"a": "\ufeffé\r\nb\rc\n", "b": "é\n".encode("latin-1")})
    raw = Raw(tmp_path)
    assert raw.text("a") == "é\nb\nc\n" and raw.text("b") == "é\n"


# ---------------------------------------------------------------------------------------------------------------------
# What is broken is told in one sentence


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("archive", ARCHIVES)
def test_a_web_page_in_place_of_an_archive(tmp_path, archive, inside):
    write(tmp_path, {"outer.zip": zipped({archive: PAGE})} if inside else {archive: PAGE})
    with pytest.raises(UserError, match="web page") as error:
        Raw(tmp_path)
    assert str(tmp_path / ("outer.zip/" * inside + archive)) in str(error.value)


@pytest.mark.parametrize("archive", ARCHIVES)
@pytest.mark.parametrize("keep", [0, 1, 3, 0.5, 0.8])
def test_an_archive_that_breaks_off(tmp_path, archive, keep):
    content = packed(archive, {"a.jpg": os.urandom(30000), "b.jpg": os.urandom(30000)})
    write(tmp_path, {archive: content[:keep if isinstance(keep, int) else int(keep * len(content))]})
    with pytest.raises(UserError, match="not a whole archive.*fetch it again"):
        Raw(tmp_path)


@pytest.mark.parametrize("archive", ARCHIVES)
def test_a_flipped_byte_never_ends_in_a_traceback(tmp_path, archive):
    content = bytearray(packed(archive))
    for place in range(0, len(content), max(1, len(content) // 75)):
        content[place] ^= 0xFF
        write(tmp_path, {archive: bytes(content)})
        content[place] ^= 0xFF
        try:
            raw = Raw(tmp_path)
        except UserError:
            continue
        for name in raw.names:
            try:
                raw.read(name)
            except OSError:
                pass


def test_a_tar_with_a_damaged_header_in_its_middle_is_no_shorter_one(tmp_path):
    content = bytearray(tarred(FILES))
    content[1024 + 10] ^= 0xFF  # the second member's header
    write(tmp_path, {"x.tar": bytes(content)})
    with pytest.raises(UserError, match="breaks off or is damaged"):
        Raw(tmp_path)


def test_a_tar_without_the_zeros_at_its_end_is_whole(tmp_path):
    write(tmp_path, {"x.tar": tarred(FILES)[:6 * 512]})
    assert len(Raw(tmp_path).names) == 3


def test_a_damaged_member_is_an_os_error_when_it_is_read(tmp_path):
    content = zipped({"a.jpg": b"A" * 100, "b.jpg": b"B" * 100})
    write(tmp_path, {"x.zip": content.replace(b"A" * 50, b"C" * 50)})
    raw = Raw(tmp_path)
    assert raw.read("x.zip/b.jpg") == b"B" * 100
    with pytest.raises(OSError, match="x.zip/a.jpg.*CRC"):
        raw.read("x.zip/a.jpg")


def test_an_encrypted_member_is_an_os_error_when_it_is_read(tmp_path):
    content = bytearray(zip_of(b"a.jpg", marked=False))
    content[6] |= 1
    content[content.index(b"PK\1\2") + 8] |= 1
    write(tmp_path, {"x.zip": bytes(content)})
    with pytest.raises(OSError, match="a.jpg.*encrypted"):
        Raw(tmp_path).read("x.zip/a.jpg")


def test_a_link_to_no_archive(tmp_path):
    (tmp_path / "x.zip").symlink_to("gone.zip")
    with pytest.raises(UserError, match="x.zip: cannot be read .No such file"):
        Raw(tmp_path)


def claiming(size: int) -> bytes:
    content = bytearray(zip_of(b"a.jpg", marked=False))
    struct.pack_into("<I", content, content.index(b"PK\1\2") + 24, size)
    return bytes(content)


def sparse_tar(size: int) -> bytes:
    member = tarfile.TarInfo("a.jpg")
    member.size = size
    return member.tobuf()


@pytest.mark.parametrize(("archive", "make"), [("x.zip", claiming), ("x.tar", sparse_tar)])
def test_a_member_that_claims_too_much_is_refused(tmp_path, monkeypatch, archive, make):
    monkeypatch.setattr(module, "LARGEST_MEMBER", 1 << 20)
    path = tmp_path / archive
    path.write_bytes(make((1 << 20) + 1))
    if archive == "x.tar":
        os.truncate(path, 512 + (1 << 20) + 2048)
    with pytest.raises(UserError, match=f"{archive}: a.jpg would unpack to 1 MB; refused"):
        Raw(tmp_path)


def test_a_member_that_unpacks_to_far_more_than_it_takes_is_refused(tmp_path):
    write(tmp_path, {"x.zip": claiming(300 << 20)})
    with pytest.raises(UserError, match="a.jpg would unpack to 300 MB; refused"):
        Raw(tmp_path)


@pytest.mark.parametrize("archive", ["x.tar.gz", "x.tar.bz2", "x.tar.xz", "x.tar.Z"])
def test_a_tar_that_unpacks_to_far_more_than_it_takes_is_refused(tmp_path, monkeypatch, archive):
    monkeypatch.setattr(module, "_most", lambda size: 4096)
    write(tmp_path, {archive: packed(archive)})
    with pytest.raises(UserError, match="would unpack to more than 0 MB; refused"):
        Raw(tmp_path)


# ---------------------------------------------------------------------------------------------------------------------
# Other programs


@pytest.mark.parametrize(("archive", "content", "tool"), [
    ("x.tar.Z", compressed(tarred(FILES)), "gzip"), ("x.rar", b"Rar!\x1a\x07\0", "unar, unrar, 7-Zip or bsdtar")])
def test_a_missing_program_is_named(tmp_path, monkeypatch, archive, content, tool):
    write(tmp_path / "in", {archive: content})
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=f"{archive}: needs .*{tool}.*install"):
        Raw(tmp_path / "in")


def program(folder, name: str, code: str):
    """A program in place of one that reads RAR: its code, in which `archive` and `target` are paths."""
    places = {word: number for number, option in enumerate(module.UNRAR[name].split(), start=1)
              for word in ("archive", "target") if f"{{{word}}}" in option}
    lines = [f"#!{sys.executable}", "import os, sys, zipfile",
             *(f"{word} = sys.argv[{place}].removeprefix('-o')" for word, place in places.items()), code]
    write(folder, {name: "\n".join(lines)})
    (folder / name).chmod(0o755)


@pytest.mark.parametrize("name", module.UNRAR)
def test_rar_is_read_by_whichever_program_can(tmp_path, monkeypatch, name):
    members = FILES | {"__MACOSX/._1.jpg": b"\0", "inner.zip": zipped({"x.jpg": "x"})}
    write(tmp_path / "in", {"x.rar": zipped(members)})
    for other in module.UNRAR:
        program(tmp_path / "bin", other, "zipfile.ZipFile(archive).extractall(target)" if other == name else
                "open(target + '/half.jpg', 'w').close(); sys.exit(1)")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    raw = Raw(tmp_path / "in")
    assert contents(raw) == {f"x.rar/{name}": content for name, content in FILES.items()} | {"x.rar/inner.zip/x.jpg": b"x"}


def test_links_that_a_program_makes_of_copies_count_and_lead_nowhere_else(tmp_path, monkeypatch):
    (tmp_path / "secret.jpg").write_text("secret")
    write(tmp_path / "in", {"x.rar": zipped(FILES)})
    links = {"copy.txt": "3.txt", "away.jpg": str(tmp_path / "secret.jpg"), "up.jpg": "../../secret.jpg", "none": "gone"}
    program(tmp_path / "bin", "unar", "\n".join([
        "zipfile.ZipFile(archive).extractall(target)", f"for name, leads in {links}.items():",
        "    os.symlink(leads, target + '/' + name)", "os.symlink('..', target + '/folder')"]))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    found = contents(Raw(tmp_path / "in", tmp_path))
    assert found == {f"x.rar/{name}": content for name, content in (FILES | {"copy.txt": b"three"}).items()}


@pytest.mark.parametrize("name", module.UNRAR)
@pytest.mark.parametrize("archive", real_rar.CONTENTS, ids=["RAR 3", "solid", "RAR 5"])
def test_a_real_rar_is_read_right_or_not_at_all(tmp_path, monkeypatch, name, archive):
    if not shutil.which(name):
        pytest.skip(f"{name} is not installed")
    write(tmp_path / "in", {"x.rar": archive})
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    try:
        raw = Raw(tmp_path / "in")
    except UserError as error:
        assert f"{name} cannot read it" in str(error)
        pytest.skip(f"this build of {name} lacks what the archive needs")
    assert contents(raw) == {f"x.rar/{name}": content for name, content in real_rar.CONTENTS[archive].items()}


def test_rar_that_no_program_can_read(tmp_path, monkeypatch):
    write(tmp_path / "in", {"x.rar": PAGE})
    program(tmp_path / "bin", "7z", "sys.exit(2)")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(UserError, match="x.rar: not a whole archive .7z cannot read it, but unar may.: it is a web page"):
        Raw(tmp_path / "in")


def test_the_fixture_of_compress_is_what_gzip_reads():
    content = os.urandom(1000)
    unpacked = subprocess.run(["gzip", "-dc"], input=compressed(content), capture_output=True, check=True).stdout
    assert unpacked == content
