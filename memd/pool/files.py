"""Orders about page files and reports of what became of them: plain data between pool and disk."""

from dataclasses import dataclass, field

from memd.types import BadFile, DiskFault, FilePath, SlotId, TransferId


@dataclass(frozen=True, slots=True)
class PageFile:
    """The content of one page that has all its tokens, as a file is named after it."""

    key: bytes  # memd.pool.keys
    parent: bytes  # the key of what precedes it
    tokens: bytes  # all tokens of the page, native int32
    packed: bool = False  # the format that it has in the file


@dataclass(frozen=True, slots=True)
class FileTransfer:
    """An order to write a host slot to a file or to read a file into it."""

    id: TransferId
    path: FilePath
    slot: SlotId
    file: PageFile
    remove: tuple[bytes, ...] = ()  # files that go before, to make room


@dataclass(frozen=True, slots=True)
class FileChanges:
    """An order to remove files and to note that others were used."""

    remove: tuple[bytes, ...] = ()
    touch: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class FileReport:
    """A transfer has ended. Without a fault and a reason it has succeeded.

    `fault`: what the file system refused; `bad`: why the file was no hit (it is removed).
    """

    id: TransferId
    fault: DiskFault | None = None
    bad: BadFile | None = None


@dataclass(frozen=True, slots=True)
class IndexReport:
    """Part of what the directory held at the start, most recently used first; `last` ends it.

    `packed`: those of `keys` whose files hold packed pages; `rejected`: files that were no good and
    are removed, by reason; `fault`: why the directory cannot be read.
    """

    keys: tuple[bytes, ...] = ()
    packed: frozenset[bytes] = frozenset()
    rejected: dict[BadFile, int] = field(default_factory=dict)
    fault: DiskFault | None = None
    last: bool = False


FileOrder = FileTransfer | FileChanges
DiskReport = FileReport | IndexReport
