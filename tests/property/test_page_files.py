"""A directory of page files against a model of it: whatever happens, a read is right or refused."""

import os
import random
import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from memd.pool.files import PageFile
from memd.pool.keys import page_key, root_key
from memd.tiers.disk import index_of
from memd.tiers.page_files import PackedPage, PageFiles, RejectedFile

PAGE_TOKENS, PAGE_BYTES, PACKED = 4, 300, PackedPage("int8-4", 170)
NUMBERS = st.integers(0, 5)


class Crash(BaseException):
    """The process is gone: nobody cleans up."""


def page_file(number: int) -> PageFile:
    parent, tokens = root_key("n"), number.to_bytes(4, "little") * PAGE_TOKENS
    return PageFile(page_key(parent, tokens), parent, tokens, packed=is_packed(number))


def is_packed(number: int) -> bool:
    return number % 2 == 1


def size_bytes(number: int) -> int:
    return PACKED.page_bytes if is_packed(number) else PAGE_BYTES


def content(number: int) -> bytes:
    return random.Random(number).randbytes(size_bytes(number))


class DirectoryMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.path = Path(tempfile.mkdtemp())
        self.there: set[int] = set()
        self.damaged: set[int] = set()
        self.open()

    def open(self) -> None:
        self.files = PageFiles(self.path / "cache", "n", PAGE_TOKENS, PAGE_BYTES, PACKED)
        self.files.open()

    @rule(number=NUMBERS)
    def write(self, number: int) -> None:
        self.files.write(page_file(number), memoryview(content(number)))
        self.there.add(number)
        self.damaged.discard(number)

    @rule(number=NUMBERS, at=st.sampled_from(["open", "writev", "close", "rename"]))
    def crash_while_writing(self, number: int, at: str) -> None:
        """The process dies before, in or after a step of a write."""
        target, name = (Path, at) if at == "rename" else (os, at)
        real = getattr(target, name)

        def dies(*arguments: object, **more: object) -> object:
            if at == "writev":  # half of it is written
                os.write(arguments[0], bytes(arguments[1][0])[:50])  # type: ignore[arg-type,index]
            raise Crash

        setattr(target, name, dies)
        try:
            self.files.write(page_file(number), memoryview(content(number)))
        except Crash:
            pass
        finally:
            setattr(target, name, real)
        self.restart()

    @rule(number=NUMBERS, refused=st.sampled_from([28, 13, 5]))
    def refused(self, number: int, refused: int) -> None:
        """The file system refuses: nothing is left of it, and what was there is still there."""

        def refuses(*_: object) -> int:
            raise OSError(refused, "told to refuse")

        real, os.writev = os.writev, refuses  # type: ignore[assignment]
        try:
            self.files.write(page_file(number), memoryview(content(number)))
            raise AssertionError("written")
        except OSError:
            pass
        finally:
            os.writev = real
        assert not list(self.path.rglob("*.tmp"))

    @rule(number=NUMBERS)
    def remove(self, number: int) -> None:
        self.files.remove(page_file(number).key)
        self.there.discard(number)
        self.damaged.discard(number)

    @precondition(lambda self: self.there)
    @rule(which=st.integers(0, 99), at=st.integers(0, 10**6), shorter=st.booleans())
    def damage(self, which: int, at: int, shorter: bool) -> None:
        number = sorted(self.there)[which % len(self.there)]
        path = self.files.path(page_file(number).key)
        data = bytearray(path.read_bytes())
        if shorter:
            data = data[: at % len(data)]
        else:
            data[at % len(data)] ^= 1 + at % 255
        if number not in self.damaged:
            path.write_bytes(data)
        self.damaged.add(number)

    @rule(number=NUMBERS)
    def read(self, number: int) -> None:
        page = bytearray(size_bytes(number))
        try:
            self.files.read(page_file(number), memoryview(page))
        except RejectedFile:
            assert number in self.damaged
        except FileNotFoundError:
            assert number not in self.there
        else:
            assert number in self.there - self.damaged
            assert page == content(number)

    @rule()
    def restart(self) -> None:
        self.files.close()
        self.open()
        *parts, last = index_of(self.files)
        assert last.last
        assert last.fault is None
        keys = {key for part in parts for key in part.keys}
        gone = {number for number in self.damaged if page_file(number).key not in keys}
        self.there -= gone  # seen to be no good without reading all of it
        self.damaged -= gone
        assert keys == {page_file(number).key for number in self.there}
        packed = {key for part in parts for key in part.packed}
        assert packed == {page_file(number).key for number in self.there if is_packed(number)}
        assert sum(last.rejected.values()) == len(gone)
        everything = {path for path in self.path.rglob("*.*") if path.name != "memd.lock"}
        assert everything == {self.files.path(key) for key in keys}

    def teardown(self) -> None:
        if hasattr(self, "path"):
            self.files.close()
            shutil.rmtree(self.path)


TestDirectoryMachine = DirectoryMachine.TestCase
TestDirectoryMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
