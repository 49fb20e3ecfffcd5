"""Downloads from a local server that fails in various ways."""

import gzip
import hashlib
import http.server
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.datasets.files import SAMPLE
from torchmn.datasets import DatasetError, mnist
from torchmn.datasets.formats.download import fetch
from torchmn.datasets.formats.idx import content_sha256
from torchmn.datasets.load_mnist import SPLITS, MnistSplit, ensure, load

CONTENT = bytes(range(256)) * 1000
SHA256 = hashlib.sha256(CONTENT).hexdigest()
NAME = "numbers.gz"


class Mirror:
    """A web server on this machine. `files` are served; `asked` are the requests."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.announce_more = 0
        self.length: str | None = None
        self.never_ends = False
        self.stopped = threading.Event()
        mirror = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name = self.path.lstrip("/")
                mirror.asked.append(name)
                if name not in mirror.files:
                    self.send_error(404)
                    return
                self.send_response(200)
                length = str(len(mirror.files[name]) + mirror.announce_more)
                self.send_header("Content-Length", length if mirror.length is None else mirror.length)
                self.flush_headers() if mirror.never_ends else self.end_headers()
                self.wfile.write(mirror.files[name])
                while mirror.never_ends and not mirror.stopped.wait(0.1):
                    self.wfile.write(b"X-Header: more\r\n")

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def mirror(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    mirror = Mirror()
    thread = threading.Thread(target=mirror.server.serve_forever, daemon=True)
    thread.start()
    yield mirror
    mirror.stopped.set()
    mirror.server.shutdown()
    mirror.server.server_close()


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a port on which no server listens."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{unused.getsockname()[1]}"


@pytest.fixture
def sample_as_split() -> MnistSplit:
    """The files of the sample as a published split, with their checksums."""
    files = SPLITS["test"]
    return MnistSplit(
        replace(files.images, sha256=content_sha256(SAMPLE / files.images.name)),
        replace(files.labels, sha256=content_sha256(SAMPLE / files.labels.name)),
    )


def failed(folder: Path, *mirrors: str) -> str:
    """Returns the error of `fetch`, which must not leave files."""
    with pytest.raises(DatasetError) as caught:
        fetch(NAME, SHA256, folder, mirrors)
    assert list(folder.iterdir()) == []
    return str(caught.value)


def test_a_file_arrives_under_its_name_with_its_content(mirror, tmp_path):
    mirror.files[NAME] = gzip.compress(CONTENT)
    path = fetch(NAME, SHA256, tmp_path / "new" / "folder", [mirror.url])
    assert path == tmp_path / "new" / "folder" / NAME
    assert gzip.decompress(path.read_bytes()) == CONTENT
    assert list(path.parent.iterdir()) == [path]


def test_content_packed_in_another_way_is_the_same_content(mirror, tmp_path):
    mirror.files[NAME] = gzip.compress(CONTENT, compresslevel=1)
    assert fetch(NAME, SHA256, tmp_path, [mirror.url + "/"]).is_file()


def test_a_file_with_another_content_never_appears(mirror, tmp_path):
    wrong = CONTENT[:-1] + b"!"
    mirror.files[NAME] = gzip.compress(wrong)
    message = failed(tmp_path, mirror.url)
    assert SHA256 in message
    assert hashlib.sha256(wrong).hexdigest() in message


def test_a_damaged_gzip_file_never_appears(mirror, tmp_path):
    packed = bytearray(gzip.compress(CONTENT))
    packed[len(packed) // 2] ^= 1
    mirror.files[NAME] = bytes(packed)
    failed(tmp_path, mirror.url)


def test_a_file_shorter_than_announced_never_appears(mirror, tmp_path):
    mirror.files[NAME] = gzip.compress(CONTENT)
    mirror.announce_more = 10
    failed(tmp_path, mirror.url)


@pytest.mark.parametrize("announced", [None, "", "many", "-1", "9" * 5000])
def test_a_file_larger_than_the_limit_is_not_downloaded(announced, mirror, tmp_path):
    mirror.files[NAME], mirror.length = gzip.compress(CONTENT), announced
    with pytest.raises(DatasetError, match=r"expected at most 100 bytes, got|Exceeds the limit"):
        fetch(NAME, SHA256, tmp_path, [mirror.url], max_bytes=100)
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_never_ends_is_left_after_the_limit(mirror, tmp_path):
    mirror.files[NAME], mirror.never_ends = b"X-Header: 1\r\n", True
    with pytest.raises(DatasetError, match=r"not complete after 0\.5 s"):
        fetch(NAME, SHA256, tmp_path, [mirror.url], max_seconds=0.5)
    assert list(tmp_path.iterdir()) == []


def test_the_next_mirror_is_tried_when_one_fails(mirror, unreachable, tmp_path):
    mirror.files[NAME] = gzip.compress(CONTENT)
    assert fetch(NAME, SHA256, tmp_path, [unreachable, f"{mirror.url}/no/such/place", mirror.url]).is_file()
    assert mirror.asked == [f"no/such/place/{NAME}", NAME]


def test_offline_the_error_names_the_reason_of_each_mirror_and_what_to_do(mirror, unreachable, tmp_path):
    message = failed(tmp_path, unreachable, mirror.url)
    assert f"{unreachable}/{NAME}: no connection" in message
    assert f"{mirror.url}/{NAME}: HTTP 404" in message
    assert str(tmp_path) in message
    assert "omit download=True" in message


def test_a_folder_that_cannot_be_created_is_an_error_that_names_it(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DatasetError, match=r"file/folder.*Pass a writable root"):
        fetch(NAME, SHA256, tmp_path / "file" / "folder", ["http://127.0.0.1:1"])


def test_ensure_fetches_both_files_once_and_they_load(mirror, tmp_path, sample_as_split):
    for file in (sample_as_split.images, sample_as_split.labels):
        mirror.files[file.name] = (SAMPLE / file.name).read_bytes()
    for _ in range(2):
        ensure(sample_as_split, tmp_path, [mirror.url])
    assert mirror.asked == ["t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"]
    assert torch.equal(load("fetched", sample_as_split, tmp_path).images, mnist("test").images)


def test_mnist_refuses_a_mirror_that_has_something_else(mirror, tmp_path):
    for path in SAMPLE.glob("*.gz"):
        mirror.files[path.name] = path.read_bytes()
    with pytest.raises(DatasetError, match=r"t10k-images.*\n.*expected SHA-256 0fa7898d"):
        mnist("test", tmp_path, download=True, mirrors=mirror.url)
    assert list(tmp_path.iterdir()) == []


def test_download_does_not_overwrite_a_file_that_is_something_else(mirror, tmp_path):
    mine = tmp_path / "train-images-idx3-ubyte"
    mine.write_bytes(b"mine")
    with pytest.raises(DatasetError, match="Remove it to have it downloaded"):
        mnist("train", tmp_path, download=True, mirrors=[mirror.url])
    assert mine.read_bytes() == b"mine"
    assert mirror.asked == []


def test_without_a_root_the_cache_folder_is_used(mirror, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(DatasetError, match=r"torchmn/mnist"):
        mnist("test", download=True, mirrors=mirror.url)
