"""Which database the settings name, and what is shown of it."""

import pytest

from memd.config import build, dump
from memd.config_operator import HistorySettings
from memd.errors import SettingsError
from memd.store.database import database_of, parse_url
from memd.store.errors import StoreError

SECRET = "hunter2"


def test_the_usual_one_is_a_file_in_the_state_directory(tmp_path):
    database = database_of(HistorySettings(), tmp_path)
    assert database.path == tmp_path / "history.db"
    assert not database.path.exists()  # nothing is opened before it is asked for


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("postgresql://ada@db/memd", "postgresql+psycopg://ada@db/memd"),
        ("postgres://ada@db/memd", "postgresql+psycopg://ada@db/memd"),
        ("postgresql+psycopg://db/memd?sslmode=require", None),
        ("sqlite:////var/lib/memd/h.db", "sqlite:////var/lib/memd/h.db"),
    ],
)
def test_urls_get_the_driver_that_memd_has(tmp_path, given, shown):
    assert database_of(HistorySettings(url=given), tmp_path).name == (shown or given)


@pytest.mark.parametrize(
    "given", ["mysql://db/memd", "sqlite://", "sqlite:///:memory:", "no url at all", "", "://"]
)
def test_other_databases_are_refused(given):
    with pytest.raises(StoreError, match=r"^history\.url is"):
        parse_url(given, "history.url")


@pytest.mark.parametrize(
    "url", [f"postgresql://ada:{SECRET}@db/memd", f"postgresql://ada@db/memd?password={SECRET}"]
)
def test_a_password_in_the_settings_is_refused_and_not_repeated(url):
    with pytest.raises(SettingsError, match=r"history\.url_file") as raised:
        build({"history.url": url})
    assert SECRET not in str(raised.value)


def test_a_url_with_a_password_comes_from_a_file_and_is_never_shown(tmp_path):
    file = tmp_path / "url"
    file.write_text(f"postgresql://ada:{SECRET}@127.0.0.1:1/memd\n")
    settings = build({"history.url_file": str(file)})
    database = database_of(settings.history, tmp_path)
    assert database.url.password == SECRET
    assert SECRET not in database.name
    assert SECRET not in str(dump(settings))
    with pytest.raises(Exception, match=r"127\.0\.0\.1") as raised:
        database.open()
    assert SECRET not in str(raised.value)


def test_a_file_that_is_not_there_is_told(tmp_path):
    with pytest.raises(StoreError, match=r"history\.url_file .*none cannot be read"):
        database_of(HistorySettings(url_file=tmp_path / "none"), tmp_path)


def test_two_urls_are_refused():
    with pytest.raises(SettingsError, match="exclude each other"):
        build({"history.url": "sqlite:////a.db", "history.url_file": "/url"})
