"""API keys and the file that holds them, one JSON object a line.

A line has the key's name, a salted hash of the key, and what the key allows; the key itself is
shown once and kept nowhere. Adding is one append and revoking one rename, so a running daemon reads
either the old file or the new one. Used by the daemon and by `memd keys`.
"""

import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from memd.errors import MemdError

Scope = Literal["inference", "metrics", "admin:read", "admin:write"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
PREFIX = "memd-"
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_INT32 = 2**31
_log = logging.getLogger(__name__)


class KeysError(MemdError):
    """A keys file cannot be read or written, or a key would be invalid."""


@dataclass(frozen=True)
class ApiKey:
    """One key, as the file has it.

    Args:
        name: Unique in the file.
        salt: Random, hexadecimal.
        digest: Of the key, see `_digest`.
        scopes: What the key opens.
        tenant: Whose it is: the cache is shared, and fairness reckoned, by tenant.
        priority: Lowest and highest that its requests may ask for; None: any.
        created: Unix seconds.
        expires: Unix seconds; None: never.
    """

    name: str
    salt: str
    digest: str
    scopes: tuple[Scope, ...]
    tenant: str
    priority: tuple[int, int] | None
    created: float
    expires: float | None

    def expired(self, now: float) -> bool:
        """Whether it has expired at `now`, Unix seconds."""
        return self.expires is not None and now >= self.expires


def make_key(
    name: str,
    scopes: Sequence[str],
    tenant: str,
    priority: tuple[int, int] | None,
    lifetime_seconds: float | None,
) -> tuple[str, ApiKey]:
    """A new random key, and what the file keeps of it.

    Raises:
        KeysError: a value is not allowed; the message names it.
    """
    if unknown := [scope for scope in scopes if scope not in SCOPES]:
        raise KeysError(f"{unknown[0]!r} is no scope; there are {', '.join(SCOPES)}")
    text, salt, now = PREFIX + secrets.token_urlsafe(32), secrets.token_hex(16), time.time()
    fields = {
        "name": name,
        "salt": salt,
        "digest": _digest(text, salt),
        "scopes": [scope for scope in SCOPES if scope in scopes],
        "tenant": tenant,
        "priority": priority,
        "created": now,
        "expires": None if lifetime_seconds is None else now + lifetime_seconds,
    }
    try:
        return text, _key(fields)
    except ValueError as error:
        raise KeysError(str(error)) from None


def find_key(keys: Iterable[ApiKey], text: str) -> ApiKey | None:
    """The key that `text` is.

    All are compared, each in constant time, so that the time taken tells neither which key is near
    nor where in the file it stands. Costs 2.5 microseconds a key.
    """
    found = None
    for key in keys:
        if hmac.compare_digest(_digest(text, key.salt), key.digest):
            found = key
    return found


def _digest(text: str, salt: str) -> str:
    # Keys are 256 random bits: nobody guesses one, so a slow hash would cost time and protect
    # nothing. The salt keeps equal keys apart.
    data = text.encode("utf-8", "surrogateescape")
    return hashlib.blake2b(data, key=salt.encode(), digest_size=32).hexdigest()


class KeysFile:
    """A keys file, read again whenever it has changed.

    Lines that are wrong are logged and open nothing; the others count. A file that cannot be read
    opens nothing.

    Args:
        path: Of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: tuple[int, int, int] | None = None  # inode, size, mtime in ns
        self._keys: tuple[ApiKey, ...] = ()

    def current(self) -> tuple[ApiKey, ...]:
        """The keys now; one `stat` unless the file has changed."""
        try:
            stat = os.stat(self.path)
            seen = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
            if seen != self._seen:
                self._keys, faults = _parse(self.path.read_text(encoding="utf-8"))
                for fault in faults:
                    _log.error("%s, %s", self.path, fault)
                self._seen = seen
        except (OSError, UnicodeDecodeError) as error:
            if self._keys or self._seen is not None:
                _log.error("no key is valid any more: %s", error)
            self._keys, self._seen = (), None
        return self._keys

    def read(self) -> tuple[ApiKey, ...]:
        """The keys now, of a file without fault.

        Raises:
            KeysError: it cannot be read, or a line is wrong.
        """
        try:
            keys, faults = _parse(self.path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise KeysError(f"{self.path} cannot be read: {error}") from None
        if faults:
            raise KeysError(f"{self.path}, {faults[0]}")
        return keys

    def add(self, key: ApiKey) -> None:
        """Append a key; the file is made, for its owner alone, if there is none.

        Raises:
            KeysError: the name is taken, or the file cannot be read or written.
        """
        taken = self.path.exists() and any(each.name == key.name for each in self.read())
        if taken:
            raise KeysError(f"{self.path} has a key of the name {key.name!r} already")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            descriptor = os.open(self.path, flags, 0o600)
            with os.fdopen(descriptor, "a", encoding="utf-8") as file:
                os.fchmod(descriptor, 0o600)
                file.write(json.dumps(asdict(key)) + "\n")
        except OSError as error:
            raise KeysError(f"{self.path} cannot be written: {error.strerror}") from None

    def revoke(self, name: str) -> ApiKey:
        """Remove a key for good.

        Raises:
            KeysError: there is none of this name, or the file cannot be read or written.
        """
        keys = self.read()
        found = next((key for key in keys if key.name == name), None)
        if found is None:
            raise KeysError(f"{self.path} has no key of the name {name!r}")
        lines = [json.dumps(asdict(key)) + "\n" for key in keys if key is not found]
        try:
            with tempfile.NamedTemporaryFile(  # mode 0600
                "w", encoding="utf-8", dir=self.path.parent, prefix=".keys-", delete=False
            ) as file:
                file.writelines(lines)
            os.replace(file.name, self.path)
        except OSError as error:
            raise KeysError(f"{self.path} cannot be written: {error.strerror}") from None
        return found


def _parse(text: str) -> tuple[tuple[ApiKey, ...], list[str]]:
    """The keys of a file's text, and what is wrong with the other lines."""
    keys: dict[str, ApiKey] = {}
    faults = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            key = _key(json.loads(line))
            if key.name in keys:
                raise ValueError(f"the name {key.name!r} is taken by a line before")
            keys[key.name] = key
        except ValueError as error:
            faults.append(f"line {number}: {error}")
    return tuple(keys.values()), faults


def _key(fields: Any) -> ApiKey:
    """A key from a line's object. Raises ValueError, which never shows the hash."""
    names = ApiKey.__dataclass_fields__.keys()
    if not isinstance(fields, dict) or fields.keys() != names:
        raise ValueError(f"must be an object of {', '.join(names)}")
    for field in ("salt", "digest"):
        if not isinstance(fields[field], str) or not re.fullmatch("[0-9a-f]{32,64}", fields[field]):
            raise ValueError(f"{field} must be hexadecimal")
    for field in ("name", "tenant"):
        if not isinstance(fields[field], str) or not _NAME.fullmatch(fields[field]):
            raise ValueError(
                f"{field} is {fields[field]!r}, it must be 1 to 64 letters, digits or ._@-"
            )
    scopes = fields["scopes"]
    if not isinstance(scopes, list) or not scopes or not set(map(str, scopes)) <= set(SCOPES):
        raise ValueError(f"scopes are {scopes!r}, they must be some of {', '.join(SCOPES)}")
    for field in ("created", "expires"):
        optional = field == "expires" and fields[field] is None
        if not optional and type(fields[field]) not in (int, float):
            raise ValueError(f"{field} must be Unix seconds")
    return ApiKey(**{**fields, "scopes": tuple(scopes), "priority": _range(fields["priority"])})


def _range(priority: Any) -> tuple[int, int] | None:
    if priority is None:
        return None
    if (
        not isinstance(priority, list | tuple)
        or [type(bound) for bound in priority] != [int, int]
        or not -_INT32 <= priority[0] <= priority[1] < _INT32
    ):
        raise ValueError(
            f"priority is {priority!r}, it must be the lowest and the highest, both from "
            f"{-_INT32} to {_INT32 - 1}"
        )
    return priority[0], priority[1]
