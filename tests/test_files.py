"""Files are written as a whole or not at all."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from rollout_spec.files import check_writable, write_whole


def test_looking_whether_a_file_can_be_written_changes_nothing(tmp_path):
    new, old, link = tmp_path / "new", tmp_path / "old", tmp_path / "link"
    old.write_text("content")
    link.symlink_to(tmp_path / "nowhere")
    for path in (new, old, link):
        check_writable(path)
    assert sorted(tmp_path.iterdir()) == [link, old]
    assert old.read_text() == "content"
    for path in (tmp_path, tmp_path / "none" / "file"):
        with pytest.raises(OSError):
            check_writable(path)


def test_a_full_disk_leaves_the_old_file(monkeypatch, tmp_path):
    file = tmp_path / "file"
    file.write_text("old")

    def write_bytes(path, content):
        path.open("wb").close()
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    with pytest.raises(OSError, match="No space left on device"):
        write_whole(file, "new")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_a_link_to_itself(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(link)
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        write_whole(link, "new")


@pytest.mark.parametrize("method", ["touch", "replace", None])
def test_a_file_that_is_replaced_keeps_its_mode(monkeypatch, method, tmp_path):
    """Also where it can only be written in place: in a folder that takes no new files, or where it is mounted."""
    file = tmp_path / "file"
    file.write_text("old and longer")
    file.chmod(0o640)

    def refuse(*args, **kwargs):
        raise OSError(errno.EBUSY, "busy")

    if method is not None:
        monkeypatch.setattr(Path, method, refuse)
    write_whole(file, "new")
    assert (file.read_text(), file.stat().st_mode & 0o777) == ("new", 0o640)
    assert list(tmp_path.iterdir()) == [file]
