"""Puts the disk tier together, and lets it finish when the engine ends."""

import logging
import time
from collections.abc import Callable

from memd_kernels.formats import PackedFormat

from memd.config import DiskSettings
from memd.pool.files import IndexReport
from memd.pool.layout import KVLayout
from memd.pool.pool import Pool
from memd.tiers.copier import Copier
from memd.tiers.disk import Disk
from memd.tiers.page_files import PackedPage, PageFiles, fault_of

logger = logging.getLogger(__name__)

MIN_STAGING_PAGES = 2  # one on its way down and one on its way up
INDEX_WAIT_SECONDS = 0.2
SETTLE_SECONDS = 3.0  # the api process waits a little longer for the engine's end
_POLL_SECONDS = 0.002


def staging_pages(settings: DiskSettings, layout: KVLayout) -> int:
    """Host slots for pages on their way to and from the disk."""
    if settings.path is None:
        return 0
    return max(MIN_STAGING_PAGES, settings.staging // layout.page_bytes)


def open_disk(
    settings: DiskSettings,
    pool: Pool,
    disk: Disk,
    copier: Copier,
    namespace: str,
    expensive_tokens: int,
    form: PackedFormat | None,
) -> None:
    """Take the directory for this engine and begin to read what it holds.

    Without a path nothing is done. A directory that cannot be used leaves the engine without a disk
    tier: it serves all the same.

    Args:
        copier: Has the memory behind host slots; it is open.
        namespace: What every request shares besides its salt.
        expensive_tokens: From this length on a prefix is written when it is computed.
        form: Of packed pages; None: there are none.

    Raises:
        MemdError: another daemon uses the directory.
    """
    if settings.path is None:
        return
    layout = pool.layout
    directory = settings.path.expanduser().absolute()
    packed = None
    if form is not None:
        packed = PackedPage(f"{form.name}-{form.group_tokens}", layout.size_bytes(packed=True))
    files = PageFiles(directory, namespace, layout.page_tokens, layout.page_bytes, packed)
    pool.disk.expensive_tokens = expensive_tokens
    sizes = files.file_bytes(packed=False), files.file_bytes(packed=True)
    pool.disk.open(sizes[0], settings.limit, staging_pages(settings, layout), sizes[1])
    try:
        files.open()
    except OSError as error:
        logger.error("memory.disk.path: %s cannot be used: %s", directory, error)
        pool.advance_disk([IndexReport(fault=fault_of(error), last=True)])
        return
    disk.open(files, copier.slot)
    # What a small directory holds is known to the first request; a large one is not waited for.
    deadline = time.monotonic() + INDEX_WAIT_SECONDS
    while not pool.disk.index.complete and time.monotonic() < deadline:
        pool.advance_disk(disk.poll())
        time.sleep(_POLL_SECONDS)


def settle(pool: Pool, copier: Copier, disk: Disk, clock: Callable[[], float]) -> None:
    """Write what is to be written, for a few seconds at most; nothing else may use the pool."""
    deadline = clock() + SETTLE_SECONDS
    while pool.disk.busy and clock() < deadline:
        for transfer_id, succeeded in copier.poll():
            pool.finish_transfer(transfer_id, succeeded)
        pool.advance_disk(disk.poll())
        copier.start(pool.residency.take_orders())
        disk.start(pool.disk.take_orders())
        time.sleep(_POLL_SECONDS)
