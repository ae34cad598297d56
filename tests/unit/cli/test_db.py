"""`memd db` on a database without a daemon."""

import json
import time

import pytest
from sqlalchemy import text

from memd.config_operator import HistorySettings
from memd.store.database import database_of
from memd.store.insert import insert


@pytest.fixture
def db(memd, tmp_path):
    """Runs `memd db ...` on a state directory of its own."""

    def run(*words, code=0):
        result = memd("db", *words, "--state-dir", str(tmp_path))
        assert result.exit_code == code, result.output
        return result

    return run


def add(tmp_path, name, *rows):
    database = database_of(HistorySettings(), tmp_path)
    with database.open() as connection, connection.begin():
        insert(connection, name, rows)


def event(at, **more):
    return {"time": at, "kind": "x", "message": 'comma, "quote"', "details": {"a": 1}, **more}


def test_upgrade_makes_it_and_says_from_where_to_where(db):
    assert json.loads(db("upgrade", "--format", "json").stdout)["from"] is None
    again = json.loads(db("upgrade", "--format", "json").stdout)
    assert again["from"] == again["to"]


def test_status_tells_what_is_in_it(db, tmp_path):
    db("upgrade")
    add(tmp_path, "events", event(5.0), event(7.0))
    answer = json.loads(db("status", "--format", "json").stdout)
    assert answer["tables"]["events"] == {"rows": 2, "oldest": 5.0, "newest": 7.0}
    assert answer["schema"] == answer["newest_schema"]
    assert answer["database_bytes"] > 0
    assert "1970-01-01 00:00:07Z" in db("status").stdout


def test_prune_deletes_what_is_too_old_and_can_only_count(db, tmp_path):
    db("upgrade")
    add(tmp_path, "events", event(5.0), event(time.time()))
    would = json.loads(db("prune", "--dry-run", "--format", "json").stdout)
    assert would["would_delete_rows"]["events"] == 1
    did = json.loads(db("prune", "--format", "json").stdout)
    assert did["deleted_rows"]["events"] == 1
    rest = json.loads(db("prune", "--dry-run", "--format", "json").stdout)
    assert sum(rest["would_delete_rows"].values()) == 0


def test_export_writes_json_lines_of_a_range(db, tmp_path):
    db("upgrade")
    add(tmp_path, "events", *(event(float(at)) for at in range(12_000)))
    result = db("export", "events", "--since", "100", "--until", "11900")
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["time"] for row in rows] == [float(at) for at in range(100, 11_900)]
    assert rows[0]["details"] == {"a": 1}
    assert "11800 rows of events" in result.stderr


def test_export_knows_ages_and_rows_of_one_time(db, tmp_path):
    db("upgrade")
    now = time.time()
    add(tmp_path, "events", event(now - 7200), *(event(now - 60) for _ in range(6000)))
    assert len(db("export", "events", "--since", "1h").stdout.splitlines()) == 6000
    assert len(db("export", "events", "--until", "1h").stdout.splitlines()) == 1


def test_export_writes_csv_to_a_file(db, tmp_path):
    db("upgrade")
    add(tmp_path, "events", event(5.0))
    file = tmp_path / "events.csv"
    db("export", "events", "--csv", "--output", str(file))
    heading, row = file.read_text().splitlines()
    assert heading == "id,time,kind,message,details"
    assert row == '1,5.0,x,"comma, ""quote""","{""a"": 1}"'


def test_wrong_words_are_usage_errors(db):
    assert "'nothing' is not one of" in db("export", "nothing", code=2).output
    assert "--since" in db("export", "events", "--since", "soon", code=2).output


def test_a_database_that_is_not_there_or_too_old_is_told(db, tmp_path):
    assert "unable to open" in db("status", code=1).stderr
    database = database_of(HistorySettings(), tmp_path)
    with database.open():
        pass
    assert "has the schema none" in db("export", "events", code=1).stderr
    assert "run memd db upgrade" in db("prune", code=1).stderr


def test_a_newer_one_is_refused(db, tmp_path):
    db("upgrade")
    database = database_of(HistorySettings(), tmp_path)
    with database.open() as connection, connection.begin():
        connection.execute(text("UPDATE alembic_version SET version_num = '0999'"))
    for command in (("upgrade",), ("prune",), ("export", "events"), ("status",)):
        assert "schema 0999, this memd knows those up to" in db(*command, code=1).stderr


def test_a_file_that_is_no_database_is_left_alone(db, tmp_path):
    (tmp_path / "history.db").write_text("my diary\n" * 500)
    assert "not a database" in db("upgrade", code=1).stderr
    assert (tmp_path / "history.db").read_text() == "my diary\n" * 500
