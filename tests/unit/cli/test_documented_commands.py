"""Every `memd …` that a page names in a sentence is a command with these options."""

import re
import shlex
from pathlib import Path

import pytest
import typer

from memd.cli import app

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMAND = typer.main.get_command(app)
COMMANDS = {
    (page.relative_to(ROOT).as_posix(), text)
    for page in PAGES
    for text in re.findall(r"`(memd [a-z][^`]*)`", page.read_text(encoding="utf-8"))
}


def fault(words):
    """What the parser says against them, before anything is done; None: nothing.

    Placeholders such as N or FILE are no fault; nor is a command named without its arguments.
    """
    command, context = COMMAND, None
    given = [word for word in words if word.startswith("-")]
    while hasattr(command, "resolve_command"):
        if not words:
            return None
        context = command.make_context(command.name, ["--"], context, resilient_parsing=True)
        _, command, words = command.resolve_command(context, words)
        if command is None:
            return "No such command"
    try:
        command.make_context(command.name, list(words), context)
    except typer.BadParameter as error:
        missing = type(error).__name__ == "MissingParameter"
        return error.format_message() if missing and len(words) > len(given) else None
    except Exception as error:
        return error.format_message()
    return None


@pytest.mark.parametrize(("page", "text"), sorted(COMMANDS))
def test_it_can_be_typed_as_it_stands(page, text):
    assert fault(shlex.split(text)[1:]) is None


def test_faults_are_found_and_there_are_many_commands():
    assert len(COMMANDS) > 40
    assert "No such option" in fault(["pool", "map", "--forward", "5m"])
    assert "No such command" in fault(["pool", "mop"])
    assert "--reason" in fault(["settings", "set", "memory.limit=4GB"])
    assert fault(["settings", "set", "memory.limit=4GB", "--reason", "WHY"]) is None
