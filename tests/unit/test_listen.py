"""Sockets: permissions, what a killed daemon leaves behind, and who may take a place."""

import socket
import stat
from pathlib import Path

import pytest

from memd.config import MAX_UDS_BYTES, ServerSettings, build
from memd.errors import SettingsError
from memd.listen import ListenError, listening


def at(path: Path, **more: object) -> ServerSettings:
    return ServerSettings.model_validate({"host": None, "uds": str(path), **more})


def answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(path))
        except OSError:
            return False
        return True


@pytest.mark.parametrize("mode", ["0660", "0600", "0777"])
def test_a_unix_socket_has_its_permissions_and_goes(tmp_path, mode):
    path = tmp_path / "memd.sock"
    with listening(at(path, uds_mode=mode)) as doors:
        assert stat.S_IMODE(path.stat().st_mode) == int(mode, 8)
        assert doors.urls == [f"unix://{path}"]
        assert answers(path)
    assert list(tmp_path.iterdir()) == []


def test_both_at_once(tmp_path):
    path = tmp_path / "memd.sock"
    with listening(at(path, host="127.0.0.1", port=0)) as doors:
        assert [each.family for each in doors.sockets] == [socket.AF_INET, socket.AF_UNIX]
        assert doors.urls[0].startswith("http://127.0.0.1:")


def test_what_a_killed_daemon_left_is_replaced(tmp_path):
    path = tmp_path / "memd.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    (tmp_path / "memd.sock.new").touch()
    with listening(at(path)):
        assert answers(path)


def test_a_place_that_is_taken_is_left_alone(tmp_path):
    path = tmp_path / "memd.sock"
    with listening(at(path)):
        with (
            pytest.raises(ListenError, match="a process answers there already"),
            listening(at(path)),
        ):
            pass
        assert answers(path)


def test_a_file_is_left_alone(tmp_path):
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(ListenError, match="no socket"), listening(at(path)):
        pass
    assert path.read_text() == "data"


def test_a_socket_of_the_next_daemon_is_not_removed(tmp_path):
    path = tmp_path / "memd.sock"
    with listening(at(path)):
        path.unlink()
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(path))
    assert path.exists()


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(ListenError, match="No such file"), listening(at(tmp_path / "no" / "x")):
        pass


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"server.host": "0.0.0.0"}, "server.keys_file"),
        ({"server.host": "::"}, "server.keys_file"),
        ({"server.host": "192.168.1.5"}, "'192.168.1.5' is not loopback"),
        ({"server.host": "example.org"}, "server.keys_file"),
        ({"server.host": None}, "nothing to listen at"),
        ({"server.uds": "/" + "x" * MAX_UDS_BYTES}, "server.uds"),
        ({"server.uds_mode": "rw"}, "server.uds_mode"),
        ({"server.uds_mode": 660}, "server.uds_mode"),
        ({"server.request_timeout": 0}, "server.request_timeout"),
        ({"server.generation_timeout": "0s"}, "server.generation_timeout"),
        ({"engine.max_waiting": 0}, "engine.max_waiting"),
    ],
)
def test_settings_that_are_refused(settings, words):
    with pytest.raises(SettingsError, match=words):
        build(settings)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_loopback_needs_no_keys(host):
    assert build({"server.host": host}).server.keys_file is None


def test_other_addresses_are_allowed_with_keys():
    build({"server.host": "0.0.0.0", "server.keys_file": "keys.jsonl"})


@pytest.mark.parametrize("written", ["0640", 0o640])
def test_a_mode_as_text_or_as_yaml_reads_it(written):
    assert build({"server.uds_mode": written}).server.uds_mode == "0640"
