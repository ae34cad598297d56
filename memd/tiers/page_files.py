"""Files of pages in a directory that one process owns.

A file is named after its page's key, in one of 16 folders, and holds a header, the page's tokens
and its bytes. It appears complete or not at all: it is written beside and renamed. Nothing waits
for the medium (no fsync): after a loss of power a file may be short or hold anything, which its
checksum finds out. Folders are 0700 and files 0600, as what is in them tells the text.
"""

import errno
import fcntl
import os
import re
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b, sha256
from pathlib import Path

from memd.errors import MemdError
from memd.pool.files import PageFile
from memd.types import BadFile, DiskFault

MAGIC = b"memd KV\n"
VERSION = 2
FULL = "full"  # the format of pages in the model's dtype
LOCK_FILE = "memd.lock"
LOCK_WAIT_SECONDS = 2.0  # an engine that has just been killed holds its lock for a moment
TOKEN_BYTES = 4
_HEADER = struct.Struct("<8sIIQ16s32s32s32s32s")  # the fields of `_header`, then the checksum
_CHECKSUM_BYTES = 32
_FOLDER = re.compile("[0-9a-f]")
_FILE = re.compile("[0-9a-f]{63}[.]kv")
_TEMPORARY = re.compile("[0-9a-f]{63}[.]kv[.]tmp")
_FAULTS: dict[int, DiskFault] = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "full"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "denied"),
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR, errno.ESTALE), "gone"),
}


class RejectedFile(Exception):
    """A file that is not the page it is named after. Args: why."""

    def __init__(self, reason: BadFile) -> None:
        super().__init__(reason)
        self.reason = reason


def file_bytes(page_tokens: int, page_bytes: int) -> int:
    """Size of the file of one page."""
    return _HEADER.size + page_tokens * TOKEN_BYTES + page_bytes


def fault_of(error: OSError) -> DiskFault:
    """What a refusal of the file system means."""
    return _FAULTS.get(error.errno or 0, "failed")


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file that was there at the start; `bad` says why it is of no use."""

    key: bytes
    used_at: float  # Unix seconds
    bad: BadFile | None
    packed: bool  # of no meaning where it is of no use


@dataclass(frozen=True, slots=True)
class PackedPage:
    """What a packed page is in a file.

    `name`: of the format and what else its bytes depend on, at most 16 bytes of ASCII.
    """

    name: str
    page_bytes: int


class PageFiles:
    """Reads and writes page files of one model. Safe for several threads.

    Args:
        directory: Where; made if there is none.
        namespace: Model, dtype, page size and KV format; files of others are of no use.
        page_tokens: Tokens in a page.
        page_bytes: Bytes of a full page.
        packed: What packed pages are; None: there are none.
    """

    def __init__(
        self,
        directory: Path,
        namespace: str,
        page_tokens: int,
        page_bytes: int,
        packed: PackedPage | None = None,
    ) -> None:
        self.directory = directory
        self._formats = {FULL.encode(): page_bytes}
        if packed is not None:
            self._formats[packed.name.encode()] = packed.page_bytes
        self._model = blake2b(namespace.encode(), digest_size=32, person=b"memd model").digest()
        self._page_tokens = page_tokens
        self._lock: int | None = None

    def open(self) -> None:
        """Make the directory and take it for this process.

        Raises:
            MemdError: another process has it.
            OSError: it cannot be made or used.
        """
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(self.directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + LOCK_WAIT_SECONDS
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    holder = os.pread(lock, 32, 0).decode(errors="replace").strip()
                    os.close(lock)
                    raise MemdError(
                        f"memory.disk.path: {self.directory} is in use by the engine with pid "
                        f"{holder or 'unknown'}; each daemon needs a directory of its own"
                    ) from None
                time.sleep(0.05)
            except OSError:
                os.close(lock)
                raise
        self._lock = lock
        with suppress(OSError):  # the pid is for people; a full disk must not keep us from serving
            os.ftruncate(lock, 0)
            os.pwrite(lock, b"%d\n" % os.getpid(), 0)

    def close(self) -> None:
        """Let another process have the directory."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def page_bytes(self, packed: bool) -> int:
        """Size of a page of a format."""
        return self._formats[self._format(packed)]

    def file_bytes(self, packed: bool) -> int:
        """Size of the file of a page of a format; 0: there are none."""
        if packed and len(self._formats) == 1:
            return 0
        return file_bytes(self._page_tokens, self.page_bytes(packed))

    def path(self, key: bytes) -> Path:
        """Where the file of a key is, if there is one."""
        name = key.hex()
        return self.directory / name[0] / f"{name[1:]}.kv"

    def write(self, file: PageFile, page: memoryview) -> None:
        """Write a page, all or nothing.

        Raises:
            OSError: it cannot be written; nothing is left of it.
        """
        path = self.path(file.key)
        # The top directory is never made again: it may be a mount that is gone.
        with suppress(FileExistsError):
            path.parent.mkdir(mode=0o700)
        header = self._header(file)
        checksum = _checksum(header, file.tokens, page)
        beside = path.with_name(f"{path.name}.tmp")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            descriptor = os.open(beside, flags, 0o600)
            try:
                _write_all(descriptor, [header, checksum, file.tokens, page])
            finally:
                os.close(descriptor)
            beside.rename(path)
        except OSError:
            with suppress(OSError):
                beside.unlink()
            raise

    def read(self, file: PageFile, page: memoryview) -> None:
        """Read a page into memory of its size, which holds anything if this fails.

        Raises:
            RejectedFile: what is there is not this page, whole and unaltered.
            OSError: it cannot be read.
        """
        start_bytes = _HEADER.size + self._page_tokens * TOKEN_BYTES
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self.path(file.key), flags)
        try:
            status = os.fstat(descriptor)
            start = os.pread(descriptor, start_bytes, 0)
            bad = self._judge(start, status.st_size, file.key)
            if bad is not None:
                raise RejectedFile(bad)
            _read_all(descriptor, page, start_bytes)
        finally:
            os.close(descriptor)
        header, checksum = start[: _HEADER.size - _CHECKSUM_BYTES], start[: _HEADER.size]
        tokens = start[_HEADER.size :]
        if _checksum(header, tokens, page) != checksum[-_CHECKSUM_BYTES:]:
            raise RejectedFile("altered")
        if header != self._header(file) or tokens != file.tokens:
            raise RejectedFile("tokens")

    def remove(self, key: bytes) -> None:
        """Remove a file, if it is there. Raises OSError: it cannot be removed."""
        self.path(key).unlink(missing_ok=True)

    def touch(self, key: bytes) -> None:
        """Note that a file was used now, if it is there."""
        with suppress(OSError):
            os.utime(self.path(key))

    def scan(self) -> Iterator[FoundFile]:
        """Every page file that is there; removes what was left half written.

        Raises:
            OSError: the directory cannot be read.
        """
        for folder in os.scandir(self.directory):
            if not _FOLDER.fullmatch(folder.name) or not folder.is_dir(follow_symlinks=False):
                continue
            for entry in os.scandir(folder.path):
                if _TEMPORARY.fullmatch(entry.name):
                    os.unlink(entry.path)
                elif _FILE.fullmatch(entry.name):
                    found = self._look_at(entry, bytes.fromhex(folder.name + entry.name[:63]))
                    if found is not None:
                        yield found

    def _look_at(self, entry: "os.DirEntry[str]", key: bytes) -> FoundFile | None:
        try:
            descriptor = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None  # not ours to read: neither a page nor ours to remove
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                return None
            start = os.pread(descriptor, _HEADER.size, 0)
        finally:
            os.close(descriptor)
        bad = self._judge(start, status.st_size, key)
        packed = bad is None and _HEADER.unpack_from(start)[4].rstrip(b"\0") != FULL.encode()
        return FoundFile(key, status.st_mtime, bad, packed)

    def _header(self, file: PageFile) -> bytes:
        """All fields but the checksum."""
        form, page_bytes = self._format(file.packed), self.page_bytes(file.packed)
        fields = MAGIC, VERSION, self._page_tokens, page_bytes, form, self._model
        return _HEADER.pack(*fields, file.parent, file.key, b"")[:-_CHECKSUM_BYTES]

    def _judge(self, start: bytes, size_bytes: int, key: bytes) -> BadFile | None:
        """What is wrong with a file by its beginning and its size; None: nothing so far."""
        if len(start) < _HEADER.size:
            return "truncated"
        magic, version, page_tokens, page_bytes, form, model, _, own, _ = _HEADER.unpack_from(start)
        if magic != MAGIC:
            return "altered"
        if version != VERSION:
            return "version"
        own_bytes = self._formats.get(form.rstrip(b"\0"))
        if own_bytes is None:
            return "format"
        if (page_tokens, page_bytes, model) != (self._page_tokens, own_bytes, self._model):
            return "model"
        whole_bytes = file_bytes(page_tokens, page_bytes)
        if size_bytes < whole_bytes:
            return "truncated"
        return None if (own, size_bytes) == (key, whole_bytes) else "altered"

    def _format(self, packed: bool) -> bytes:
        return list(self._formats)[packed]


def _checksum(header: bytes, tokens: bytes, page: memoryview) -> bytes:
    # SHA-256 rather than BLAKE2: processors have instructions for it.
    digest = sha256(header)
    digest.update(tokens)
    digest.update(page)
    return digest.digest()


def _write_all(descriptor: int, parts: "list[bytes | memoryview]") -> None:
    left = [memoryview(part) for part in parts]
    while left:
        count = os.writev(descriptor, left)
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if left:
            left[0] = left[0][count:]


def _read_all(descriptor: int, into: memoryview, offset: int) -> None:
    """Raises RejectedFile: there is less than that."""
    while into:
        count = os.preadv(descriptor, [into], offset)
        if not count:
            raise RejectedFile("truncated")
        into, offset = into[count:], offset + count
