"""Rules of the repository that no other tool checks."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from memd.cli.reference import settings_page
from memd.config import LIVE_KEYS, leaves

ROOT = Path(__file__).parents[2]
SOURCES = [
    path
    for folder in ("memd", "kernels", "alerts", "dashboard", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_no_source_file_is_longer_than_400_lines():
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    too_long = {str(path.relative_to(ROOT)): n for path, n in lengths.items() if n > 400}
    assert len(SOURCES) > 10
    assert too_long == {}


def test_the_settings_page_is_what_the_tree_says():
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert page == settings_page(), "run: memd settings reference > docs/settings.md"
    assert LIVE_KEYS
    for key in LIVE_KEYS:
        assert re.search(rf"\| `{re.escape(key)}` \|.*\| live \|", page), key


def test_every_setting_says_what_it_means():
    assert [key for key, field in leaves().items() if not field.description] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_documents_lead_somewhere(document):
    text = document.read_text(encoding="utf-8")
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    assert [target for target in targets if not (document.parent / target).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_documents_name_only_commands_that_exist(document):
    from typer.main import get_command

    from memd.cli import app

    root = get_command(app)
    text = document.read_text(encoding="utf-8")
    for words in re.findall(r"\bmemd ([a-z]+(?:-[a-z]+)*(?: [a-z]+)?)", "\n".join(_code(text))):
        name, *rest = words.split()
        assert name in root.commands, words
        group = root.commands[name]
        if rest and hasattr(group, "commands"):
            assert rest[0] in group.commands, words


def _code(text: str) -> list[str]:
    """What stands in code blocks and code spans."""
    blocks = re.findall(r"```.*?```", text, flags=re.DOTALL)
    spans = re.findall(r"`[^`\n]+`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return blocks + spans


def test_the_api_process_loads_neither_torch_nor_the_pool():
    program = (
        "import sys, memd.daemon, memd.cli.serve\n"
        "print([m for m in ('torch', 'memd.pool', 'memd.arena', 'memd_kernels')"
        " if m in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert run.stdout.strip() == "[]"
