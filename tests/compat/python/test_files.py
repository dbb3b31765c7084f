"""files: read, write, list, info, rename, remove, directories, sizes, odd names."""

import hashlib
import os

import pytest
from e2b import FileType
from e2b.exceptions import InvalidArgumentException, NotFoundException


def test_text_and_bytes_come_back_as_written(sandbox):
    info = sandbox.files.write("text.txt", "héllo\n")
    assert info.path == "/home/user/text.txt" and info.name == "text.txt"
    assert sandbox.files.read("/home/user/text.txt") == "héllo\n"
    blob = bytes(range(256)) * 40
    sandbox.files.write("blob.bin", blob)
    assert bytes(sandbox.files.read("blob.bin", format="bytes")) == blob
    assert b"".join(sandbox.files.read("blob.bin", format="stream")) == blob


def test_an_empty_file(sandbox):
    sandbox.files.write("empty", "")
    assert sandbox.files.read("empty") == ""


def test_overwriting_leaves_nothing_of_the_old_content(sandbox):
    sandbox.files.write("over", "a long first content")
    sandbox.files.write("over", "short")
    assert sandbox.files.read("over") == "short"


def test_missing_parents_are_made_and_belong_to_the_user(sandbox):
    sandbox.files.write("deep/er/file", "x")
    owner = sandbox.commands.run("stat -c %U:%G /home/user/deep /home/user/deep/er /home/user/deep/er/file").stdout
    assert owner == "user:user\n" * 3


def test_several_files_in_one_call(sandbox):
    infos = sandbox.files.write_files([{"path": f"many/{i}", "data": f"content {i}"} for i in range(5)])
    assert [info.path for info in infos] == [f"/home/user/many/{i}" for i in range(5)]
    assert sandbox.files.read("many/3") == "content 3"


def test_files_of_root_belong_to_root(sandbox):
    sandbox.files.write("/root/secret", "s", user="root")
    assert sandbox.commands.run("stat -c %U /root/secret", user="root").stdout == "root\n"


def test_a_hundred_megabytes_up_and_down(sandbox, tmp_path):
    source = tmp_path / "big"
    digest = hashlib.sha256()
    with open(source, "wb") as out:
        for _ in range(100):
            block = os.urandom(1 << 20)
            digest.update(block)
            out.write(block)
    with open(source, "rb") as body:
        sandbox.files.write("/tmp/big", body, request_timeout=80)
    assert sandbox.commands.run("sha256sum < /tmp/big", timeout=80).stdout.split()[0] == digest.hexdigest()
    back = hashlib.sha256()
    for chunk in sandbox.files.read("/tmp/big", format="stream", request_timeout=80):
        back.update(chunk)
    assert back.hexdigest() == digest.hexdigest()
    sandbox.files.remove("/tmp/big")


def test_reading_what_is_not_there(sandbox):
    with pytest.raises(NotFoundException, match="nothing-here"):
        sandbox.files.read("nothing-here")


def test_reading_a_directory_is_refused(sandbox):
    with pytest.raises(InvalidArgumentException, match="directory"):
        sandbox.files.read("/home/user")


def test_exists(sandbox):
    sandbox.files.write("is", "here")
    assert sandbox.files.exists("is") is True
    assert sandbox.files.exists("is-not") is False
    assert sandbox.files.exists("/home/user") is True


def test_info_of_file_directory_and_link(sandbox):
    sandbox.files.write("info/file", "12345")
    sandbox.commands.run("chmod 640 info/file; ln -sfn /home/user/info/file info/link")
    info = sandbox.files.get_info("info/file")
    assert (info.type, info.size, info.mode, info.permissions) == (FileType.FILE, 5, 0o640, "-rw-r-----")
    assert (info.owner, info.group) == ("user", "user")
    assert sandbox.files.get_info("info").type == FileType.DIR
    assert sandbox.files.get_info("info").permissions == "drwxr-xr-x"
    link = sandbox.files.get_info("info/link")
    assert link.symlink_target == "/home/user/info/file"


def test_listing_with_depth(sandbox):
    sandbox.commands.run("mkdir -p tree/a/b && touch tree/one tree/a/two tree/a/b/three")
    assert [e.path for e in sandbox.files.list("tree")] == ["/home/user/tree/a", "/home/user/tree/one"]
    deep = {e.path.removeprefix("/home/user/tree/") for e in sandbox.files.list("tree", depth=3)}
    assert deep == {"a", "one", "a/b", "a/two", "a/b/three"}
    with pytest.raises(NotFoundException):
        sandbox.files.list("no-tree")
    with pytest.raises(InvalidArgumentException):
        sandbox.files.list("tree/one")


def test_make_dir_says_whether_it_was_new(sandbox):
    assert sandbox.files.make_dir("made/deep") is True
    assert sandbox.files.make_dir("made/deep") is False


def test_rename_moves_content_and_makes_parents(sandbox):
    sandbox.files.write("old", "content")
    info = sandbox.files.rename("old", "new/place")
    assert info.path == "/home/user/new/place"
    assert sandbox.files.read("new/place") == "content"
    assert sandbox.files.exists("old") is False
    with pytest.raises(NotFoundException):
        sandbox.files.rename("old", "elsewhere")


def test_remove_takes_directories_whole(sandbox):
    sandbox.files.write("gone/with/all", "x")
    sandbox.files.remove("gone")
    assert sandbox.files.exists("gone") is False


def test_names_with_odd_characters(sandbox):
    for name in ["with space", "quote'\"", "unicode-ü-😀", "percent%41", "plus+and&amp", "-dash", "new\nline"]:
        sandbox.files.write(f"odd/{name}", name)
        assert sandbox.files.read(f"odd/{name}") == name
    names = {entry.name for entry in sandbox.files.list("odd")}
    assert {"with space", "percent%41", "new\nline"} <= names


def test_names_that_are_not_text_do_not_break_a_listing(sandbox):
    sandbox.commands.run("mkdir -p raw && touch raw/plain && touch \"$(printf 'raw/\\377\\376')\"")
    assert "plain" in {entry.name for entry in sandbox.files.list("raw")}


def test_signed_urls_work_without_headers(make):
    import urllib.request

    sandbox = make(secure=True)
    sandbox.files.write("signed.txt", "signed content")
    url = sandbox.download_url("signed.txt", use_signature_expiration=60)
    assert urllib.request.urlopen(url, timeout=30).read() == b"signed content"
