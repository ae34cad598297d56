"""What all commands have in common: JSON, help, and completion in bash and zsh."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from memd.cli import app

# What goes on until it is ended, and what writes a document of its own kind.
LIVE = {"up", "serve", "chat", "dashboard"}
DOCUMENTS = {"settings reference", "alerts render", "db export", "trace export"}


def commands(node: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every command by its words."""
    node = typer.main.get_command(app) if node is None else node
    if not hasattr(node, "commands"):
        yield " ".join(path), node
        return
    for name, child in node.commands.items():
        yield from commands(child, (*path, name))


COMMANDS = dict(commands())


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_speaks_json_and_says_what_it_does(name: str) -> None:
    options = {option for each in COMMANDS[name].params for option in each.opts}
    asked = name not in LIVE | DOCUMENTS
    assert ("--format" in options) == asked
    assert COMMANDS[name].help


def complete(shell: str, words: str, index: int) -> str:
    instruction = {"_MEMD_COMPLETE": f"complete_{shell}", "COMP_WORDS": words}
    return subprocess.run(
        [sys.executable, "-c", "from memd.cli import main; main()"],
        env={
            **os.environ,
            **instruction,
            "COMP_CWORD": str(index),
            "_TYPER_COMPLETE_ARGS": words,
        },
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_knows_commands_and_options(shell: str) -> None:
    assert "status" in complete(shell, "memd stat", 1)
    assert "show" in complete(shell, "memd pool sh", 2)
    assert "--check" in complete(shell, "memd status --ch", 2)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """One in which `memd` is the console script, and the home is empty."""
    script = tmp_path / "bin" / "memd"
    script.parent.mkdir()
    script.write_text(f"#!{sys.executable}\nfrom memd.cli import main\nmain()\n")
    script.chmod(0o755)
    path = f"{script.parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "HOME": str(tmp_path)}


def in_shell(shell: str, code: str, environment: dict[str, str]) -> str:
    done = subprocess.run(
        [shell, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell(shell: str, environment: dict[str, str]) -> None:
    script = in_shell("sh", "memd", environment | {"_MEMD_COMPLETE": f"source_{shell}"})
    assert f"_MEMD_COMPLETE=complete_{shell}" in script
    if shutil.which(shell):
        in_shell(shell, f"{shell} -n <<'EOF'\n{script}\nEOF", environment)


def test_bash_completes_after_the_installation(environment: dict[str, str]) -> None:
    """As a newcomer does it: install, open another shell, press Tab."""
    in_shell("bash", "memd --install-completion; true", environment)
    # What bash does when Tab is pressed after `memd poo`.
    tab = (
        "shopt -s expand_aliases; . ~/.bashrc; COMP_WORDS=(memd poo); COMP_CWORD=1; "
        "complete=$(complete -p memd); function=${complete#*-F }; ${function%% *} memd poo memd; "
        'echo "${COMPREPLY[@]}"'
    )
    assert in_shell("bash", tab, environment).strip() == "pool"
