"""Files over HTTP from a server of this machine that misbehaves in every way a real one does."""

import hashlib
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from nevis_lite import datasets, fetch
from nevis_lite.config import UserError
from nevis_lite.datasets import DataSet
from nevis_lite.fetch import FetchError

CONTENT = bytes(number * 7 % 251 for number in range(300_000))
MD5 = hashlib.md5(CONTENT).hexdigest()
SHA256 = hashlib.sha256(CONTENT).hexdigest()
PAGE = b"\n <!DOCTYPE html><html>Quota exceeded</html>"


class Server(ThreadingHTTPServer):
    """`behave[path]` is a function of a handler; `asked` lists (path, Range header)."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.behave, self.asked = {}, []

    def url(self, path: str, behave) -> str:
        self.behave[path] = behave
        return f"http://127.0.0.1:{self.server_port}{path}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.asked.append((self.path, self.headers.get("Range")))
        self.server.behave[self.path](self)

    def answer(self, code: int, body: bytes, send: int | None = None, **headers):
        """`send` of the body's bytes, whose length is told in full."""
        self.send_response(code)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body[:send])

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def get(tmp_path):
    """get(url, **facts of the file): its content; `get.waits` are the seconds that were slept."""
    def get(url, accept=False, **facts):
        file = {"name": "a.zip", "url": url, **facts}
        return fetch.fetch(file, tmp_path / "set", get.said.append, get.waits.append, accept).read_bytes()

    get.waits, get.said, get.folder = [], [], tmp_path / "set"
    return get


def whole(handler):
    handler.answer(200, CONTENT)


def refuse(code):
    return lambda handler: handler.answer(code, b"no")


def send(body):
    return lambda handler: handler.answer(200, body)


def ranged(content=CONTENT, most=None):
    """A server that knows Range and breaks off after `most` bytes of each answer."""
    def behave(handler):
        asked = handler.headers.get("Range")
        if not asked:
            return handler.answer(200, content, most)
        begin = int(asked.removeprefix("bytes=").removesuffix("-"))
        if begin >= len(content):
            return handler.answer(416, b"", Content_Range=f"bytes */{len(content)}")
        return handler.answer(206, content[begin:], most, Content_Range=f"bytes {begin}-{len(content) - 1}/{len(content)}")
    return behave


def in_turn(*behaviours):
    """Another behaviour for each request; the last one stays."""
    left = list(behaviours)
    return lambda handler: (left.pop(0) if len(left) > 1 else left[0])(handler)


def test_a_file_comes_whole_under_its_own_name(server, get):
    assert get(server.url("/some%20where/b.zip?download=1", whole), md5=MD5, sha256=SHA256) == CONTENT
    assert [path.name for path in get.folder.iterdir()] == ["a.zip"] and not get.waits and not get.said


def test_a_file_that_is_there_is_not_asked_for(server, get):
    url = server.url("/a", whole)
    get(url)
    get(url)
    assert len(server.asked) == 1


def test_the_server_names_no_file(server, get):
    url = server.url("/a", lambda handler: handler.answer(200, CONTENT, Content_Disposition='attachment; filename="../evil"'))
    get(url)
    assert [path.name for path in get.folder.parent.rglob("*") if path.is_file()] == ["a.zip"]


def test_a_checksum_in_capitals_and_a_name_in_a_sub_folder(server, get):
    assert get(server.url("/a", whole), name="sub/a.zip", md5=MD5.upper()) == CONTENT
    assert (get.folder / "sub" / "a.zip").is_file()


# ---- interruption


def test_a_broken_connection_is_gone_on_with(server, get):
    assert get(server.url("/a", ranged(most=120_000)), md5=MD5) == CONTENT
    assert [begin for _, begin in server.asked] == [None, "bytes=120000-", "bytes=240000-"]
    assert get.waits == [fetch.WAITS[0]] * 2  # each try brought something new


def test_a_later_call_goes_on_too(server, get):
    get.folder.mkdir()
    (get.folder / ".a.zip.part").write_bytes(CONTENT[:1000])
    assert get(server.url("/a", ranged()), md5=MD5) == CONTENT
    assert server.asked == [("/a", "bytes=1000-")]


def test_a_whole_part_is_not_sent_again(server, get):
    get.folder.mkdir()
    (get.folder / ".a.zip.part").write_bytes(CONTENT)
    assert get(server.url("/a", ranged()), md5=MD5) == CONTENT
    assert server.asked == [("/a", f"bytes={len(CONTENT)}-")]


@pytest.mark.parametrize("start", [b"another edition" * 10, b"longer" * 100_000])
def test_the_start_of_another_edition_is_thrown_away(server, get, start):
    get.folder.mkdir()
    (get.folder / ".a.zip.part").write_bytes(start)
    assert get(server.url("/a", ranged()), md5=MD5) == CONTENT


def test_a_server_that_ignores_ranges_starts_again(server, get):
    broken = lambda handler: handler.answer(200, CONTENT, 200_000)  # noqa: E731
    assert get(server.url("/a", in_turn(broken, whole)), md5=MD5) == CONTENT
    assert [begin for _, begin in server.asked] == [None, "bytes=200000-"]


def test_a_server_that_sends_another_range_is_asked_for_all(server, get):
    get.folder.mkdir()
    (get.folder / ".a.zip.part").write_bytes(CONTENT[:1000])
    wrong = lambda handler: handler.answer(206, CONTENT[5:], Content_Range="bytes 5-299999/300000")  # noqa: E731
    assert get(server.url("/a", in_turn(wrong, whole)), md5=MD5) == CONTENT
    assert [begin for _, begin in server.asked] == ["bytes=1000-", None]


def test_a_body_that_always_ends_early_is_no_file(server, get):
    with pytest.raises(FetchError, match="broke after 200.0 kB of 300.0 kB"):
        get(server.url("/a", lambda handler: handler.answer(200, CONTENT, 200_000)))
    assert get.waits == list(fetch.WAITS)
    assert [path.name for path in get.folder.iterdir()] == [".a.zip.part"]


def test_a_busy_server_is_asked_again_after_growing_waits(server, get):
    assert get(server.url("/a", in_turn(refuse(503), refuse(429), whole))) == CONTENT
    assert get.waits == list(fetch.WAITS[:2])


def test_nobody_listens(get, server):
    port = server.server_port + 1 if server.server_port < 65535 else 1
    with pytest.raises(FetchError, match=f"127.0.0.1:{port}: .*refused"):
        get(f"http://127.0.0.1:{port}/a")
    assert get.waits == [fetch.WAITS[0]]  # of a host that was never reached less is hoped for


def test_a_host_is_waited_for_once_and_others_go_on(server, tmp_path, monkeypatch):
    """Names that cannot be resolved, a server that is always busy, and one that has files, over calls that share `hosts`."""
    known, looked_up = socket.getaddrinfo, []

    def look_up(host, *arguments, **options):
        if not host.endswith(".invalid"):
            return known(host, *arguments, **options)
        looked_up.append(host)
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    hosts, waits = {}, []

    def reason(url, name):
        try:
            fetch.fetch({"name": name, "url": url}, tmp_path, sleep=waits.append, hosts=hosts)
        except FetchError as error:
            return error.reason

    assert "a.invalid: " in reason("http://a.invalid/1", "1") and "name resolution" in reason("https://a.invalid/2", "2")
    assert waits == [fetch.WAITS[0]] and looked_up == ["a.invalid"] * 2
    assert "name resolution" in reason("http://b.invalid/3", "3")
    assert waits == [fetch.WAITS[0]] and looked_up == ["a.invalid"] * 2 + ["b.invalid"]
    assert "404" in reason(server.url("/gone", refuse(404)), "4") and reason(server.url("/a", whole), "5") is None
    for path in ("/busy", "/still"):
        assert "503" in reason(server.url(path, refuse(503)), "6")
    assert waits == [fetch.WAITS[0], *fetch.WAITS] and server.asked[2:] == [("/busy", None)] * 4


def test_a_host_that_answered_before_is_waited_for_with_patience(get, tmp_path):
    waits = []
    with pytest.raises(FetchError, match="refused"):
        fetch.fetch({"name": "a", "url": "http://127.0.0.1:1/a"}, tmp_path, sleep=waits.append, hosts={"127.0.0.1:1": ""})
    assert waits == list(fetch.WAITS)


def test_silence_ends(server, get, monkeypatch):
    monkeypatch.setattr(fetch, "TIMEOUT", 0.05)
    silent = threading.Event()
    with pytest.raises(FetchError, match="timed out"):
        get(server.url("/a", lambda handler: silent.wait(2)))
    silent.set()


# ---- refusals and wrong files


def test_a_mirror_takes_over(server, get):
    gone = server.url("/gone", refuse(404))
    assert get(gone, mirrors=[server.url("/page", send(PAGE)), server.url("/b", whole)], md5=MD5) == CONTENT
    assert [path for path, _ in server.asked] == ["/gone", "/page", "/b"] and not get.waits


@pytest.mark.parametrize("code", [401, 403])
def test_a_refusal_gives_the_manual_sentence(server, get, code):
    url = server.url("/a", refuse(code))
    with pytest.raises(FetchError) as error:
        get(url)
    told = str(error.value)
    assert f"HTTP {code}" in told and "login" in told and url in told
    assert "a.zip" in told and f"by hand, into {get.folder}" in told and error.value.code == 3
    assert len(server.asked) == 1 and not list(get.folder.iterdir())


def test_all_addresses_are_told_when_none_works(server, get):
    with pytest.raises(FetchError, match="HTTP 404.*; .*HTTP 410"):
        get(server.url("/a", refuse(404)), mirrors=[server.url("/b", refuse(410))])


@pytest.mark.parametrize("page", [PAGE, b"\xef\xbb\xbf<HTML>", b"<!-- login -->"])
def test_a_web_page_is_recognised(server, get, page):
    with pytest.raises(FetchError, match="a web page") as error:
        get(server.url("/a", send(page)), accept=True)
    assert f"by hand, into {get.folder}" in str(error.value) and not list(get.folder.iterdir())


def test_an_empty_answer_is_no_file(server, get):
    with pytest.raises(FetchError, match="sent nothing"):
        get(server.url("/a", send(b"")))
    assert not (get.folder / "a.zip").exists()


@pytest.mark.parametrize("accept", [True, False])
def test_a_short_message_is_not_a_new_edition(server, get, accept):
    with pytest.raises(FetchError, match="only 12 B, which is not the file: md5 .* in place of") as error:
        get(server.url("/a", send(b"error code 5")), accept=accept, md5=MD5)
    assert "--accept-new-checksum" not in str(error.value) and not list(get.folder.iterdir())


def test_a_wrong_checksum_leaves_nothing_and_offers_to_take_it(server, get):
    with pytest.raises(FetchError, match="packed anew.*--accept-new-checksum"):
        get(server.url("/a", send(CONTENT + b"!")), md5=MD5)
    assert not list(get.folder.iterdir()) and len(server.asked) == 1


def test_a_new_edition_is_taken_on_request(server, get):
    assert get(server.url("/a", send(CONTENT + b"!")), accept=True, sha256=SHA256) == CONTENT + b"!"
    assert len(get.said) == 1 and SHA256 in get.said[0]


def test_a_mixture_of_two_editions_is_never_taken(server, get):
    get.folder.mkdir()
    (get.folder / ".a.zip.part").write_bytes(b"old" * 1000)
    assert get(server.url("/a", ranged(CONTENT + b"!")), accept=True, md5=MD5) == CONTENT + b"!"


def test_a_manual_file_is_fetched_from_its_mirror_alone(server, get):
    page = server.url("/page", whole)
    assert get(page, manual="Log in.", mirrors=[server.url("/b", whole)]) == CONTENT
    assert [path for path, _ in server.asked] == ["/b"]


def test_a_manual_file_without_mirror_is_not_asked_for(server, get):
    with pytest.raises(FetchError) as error:
        get(server.url("/page", whole), manual="Log in to Kaggle and accept the rules.")
    told = str(error.value)
    assert "Log in to Kaggle" in told and "/page" in told and "a.zip" in told and "cannot be fetched" not in told
    assert not server.asked


@pytest.mark.parametrize("url", ["nonsense", "http://[bad/", "nosuch://x/a"])
def test_no_address_at_all(get, url):
    with pytest.raises(FetchError, match="a.zip cannot be fetched"):
        get(url)


def test_an_address_with_a_space_is_quoted(server, get):
    assert get(server.url("/a%20b", whole).replace("%20", " ")) == CONTENT


# ---- what is there


def entry(folder, *names, **facts):
    return DataSet("set", "Set", folder, files=[{"name": name, "url": "http://x/"} for name in names], **facts)


def test_what_lacks_is_told_file_by_file(tmp_path):
    dataset = entry(tmp_path / "set", "a.zip", "b.tar.gz", "c.csv")
    assert len(fetch.absent(dataset)) == 3
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / ".c.csv.part").touch()
    (tmp_path / "set" / "archive.zip").touch()  # the name that a browser gives to what comes from Kaggle
    assert len(fetch.absent(dataset)) == 3
    (tmp_path / "set" / "a.zip").touch()
    (tmp_path / "set" / "b").mkdir()  # unpacked
    assert [file["name"] for file in fetch.absent(dataset)] == ["c.csv"]


def test_a_file_may_stand_in_for_another(tmp_path):
    files = [{"name": "a.zip"}, {"name": "b.zip", "instead_of": "a.zip"}, {"name": "c.csv"}]
    dataset = DataSet("set", "Set", tmp_path, files=files)
    assert fetch.absent(dataset) == [files[0], files[2]]
    (tmp_path / "b.zip").touch()
    assert fetch.absent(dataset) == [files[2]]
    (tmp_path / "c.csv").touch()
    assert fetch.absent(dataset) == []


def test_own_class_folders_or_idx_files_may_take_the_place_of_all(tmp_path):
    (tmp_path / "one" / "train").mkdir(parents=True)
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "train-images-idx3-ubyte.gz").touch()
    assert fetch.absent(entry(tmp_path / "one", "a.zip")) == fetch.absent(entry(tmp_path / "two", "a.zip")) == []
    (tmp_path / "three").mkdir()
    (tmp_path / "three" / "test-images-idx3-ubyte.gz").touch()  # which alone are no data set
    assert len(fetch.absent(entry(tmp_path / "three", "a.zip"))) == 1


@pytest.mark.parametrize("archive", ["train.zip", "train.TAR.GZ"])
def test_an_unpacked_archive_named_train_is_a_published_file_and_no_layout_of_ones_own(tmp_path, archive):
    (tmp_path / "train").mkdir()
    dataset = entry(tmp_path, archive, "labels.csv", reader="no_such_reader")
    assert [file["name"] for file in fetch.absent(dataset)] == ["labels.csv"] and datasets.own_layout(dataset) is None
    with pytest.raises(UserError, match="unknown reader no_such_reader"):
        datasets.read(dataset)


def test_files_at_hand_are_linked(tmp_path):
    (tmp_path / "raw" / "set").mkdir(parents=True)
    (tmp_path / "raw" / "set" / "a.zip").write_bytes(b"a")
    dataset = entry(tmp_path / "data" / "set", "a.zip", "b.zip")
    assert fetch.link(dataset.files[0], dataset, tmp_path / "raw", unique=False)
    assert not fetch.link(dataset.files[1], dataset, tmp_path / "raw", unique=True)
    assert (dataset.folder / "a.zip").is_symlink() and (dataset.folder / "a.zip").read_bytes() == b"a"


def test_files_at_hand_are_copied_where_links_are_not_known(tmp_path, monkeypatch):
    (tmp_path / "a.zip").write_bytes(b"a")
    dataset = entry(tmp_path / "set", "a.zip")
    monkeypatch.setattr("pathlib.Path.symlink_to", lambda *_: (_ for _ in ()).throw(OSError("no links here")))
    assert fetch.link(dataset.files[0], dataset, tmp_path, unique=True)
    assert not (dataset.folder / "a.zip").is_symlink() and (dataset.folder / "a.zip").read_bytes() == b"a"


def test_a_name_that_several_data_sets_use_is_taken_by_its_checksum(tmp_path):
    (tmp_path / "a.zip").write_bytes(CONTENT)
    dataset, said = entry(tmp_path / "set", "a.zip"), []
    assert not fetch.link({"name": "a.zip"}, dataset, tmp_path, False, said.append)
    assert not fetch.link({"name": "a.zip", "md5": "0" * 32}, dataset, tmp_path, True, said.append)
    assert len(said) == 1 and "is not taken" in said[0]
    assert fetch.link({"name": "a.zip", "md5": MD5}, dataset, tmp_path, False, said.append)


def test_every_published_file_of_the_catalogue_can_be_got_somehow(tmp_path):
    for key, dataset in datasets.catalogue(tmp_path).items():
        names = [file["name"] for file in dataset.files]
        assert len(set(names)) == len(names), key
        for file in dataset.files:
            assert set(file) <= {"name", "url", "md5", "sha256", "mirrors", "manual", "instead_of"}, (key, file)
            assert "url" in file or "manual" in file, (key, file)
            assert file.get("instead_of", file["name"]) in names, (key, file)
            assert not file["name"].startswith((".", "/")) and ".." not in file["name"].split("/"), (key, file)
            for kind, length in (("md5", 32), ("sha256", 64)):
                assert len(bytes.fromhex(file.get(kind, "0" * length))) * 2 == length, (key, file)
            for url in [file.get("url", "http://"), *file.get("mirrors", [])]:
                assert url.startswith(("http://", "https://")), (key, file)
