"""Takes secrets out of text that leaves the machine: those known here, and what looks like one."""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

import yaml

from memd.config import Settings

REMOVED = "[removed]"
_LEAST_CHARACTERS = 6
_NAMES = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
_PATTERNS = (
    # Keys as memd, OpenAI's clients, GitHub, Slack and Hugging Face write them.
    (re.compile(r"\b(?:memd-|sk-|hf_|gh[pousr]_|xox[abprs]-)[A-Za-z0-9_-]{16,}"), REMOVED),
    (re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{6,}"), rf"\1 {REMOVED}"),
    (re.compile(r"(://)[^/\s\"'@]+@"), rf"\1{REMOVED}@"),
    (
        re.compile(
            r"(?i)\b([a-z0-9_-]*(?:password|passwd|secret|api[_-]?key|access[_-]?token|auth[_-]?"
            r"token|authorization)[\"']?\s*[=:]\s*[\"']?)(?!\[removed\]|null\b|bearer |basic )"
            r"[^\s\"',;&}]+"
        ),
        rf"\1{REMOVED}",
    ),
)


class Scrubber:
    """Removes secrets.

    Args:
        known: Secrets in their own words.
    """

    def __init__(self, known: Iterable[str] = ()) -> None:
        longest_first = sorted({each for each in known if len(each) >= _LEAST_CHARACTERS}, key=len)
        self._known = longest_first[::-1]

    def clean(self, text: str) -> str:
        """The text without them."""
        for secret in self._known:
            text = text.replace(secret, REMOVED)
        for pattern, instead in _PATTERNS:
            text = pattern.sub(instead, text)
        return text


def known_secrets(settings: Settings, environment: Mapping[str, str] = os.environ) -> set[str]:
    """What is secret on this machine: in the environment, in channels, in the database's URL.

    Args:
        settings: Name the files; one that cannot be read has none.
        environment: Of the process.
    """
    found = {value for name, value in environment.items() if _NAMES.search(name)}
    urls = [environment.get("MEMD_HISTORY_URL", ""), _text(settings.history.url_file).strip()]
    try:
        channels = yaml.safe_load(_text(settings.alerts.channels))
    except yaml.YAMLError:
        channels = None
    urls += _strings(channels)
    return found | {part for url in urls for part in _parts(url)}


def _text(path: Path | None) -> str:
    try:
        return "" if path is None else path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeError):
        return ""


def _strings(data: object) -> list[str]:
    """All texts inside lists and mappings that are URLs."""
    if isinstance(data, str):
        return [data] if "://" in data else []
    if isinstance(data, Mapping):
        data = list(data.values())
    return [text for each in data for text in _strings(each)] if isinstance(data, list) else []


def _parts(url: str) -> Iterable[str]:
    """A URL, its password, and those of its parts that may be tokens."""
    try:
        parts = urlsplit(url)
        password = parts.password
    except ValueError:
        return
    yield url
    if password:
        yield password
        yield unquote(password)
    for part in re.split(r"[/?&=:@]", url.partition("://")[2]):
        if len(part) >= 16:
            yield part
