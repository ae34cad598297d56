"""A trace of requests as JSON lines: one header, then one line for each sequence, by arrival.

The daemon exports traces in this form and the simulator reads them. A trace has no text and no
token ids: pages are named by digests under a random key that was forgotten when the recording
ended. Digests are chained, so equal ones mean equal text from the beginning of the prompt on.
Lines may have more fields than are known here; a change that breaks readers raises `VERSION`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, TypeVar

import msgspec

from memd.errors import MemdError

FORMAT: Literal["memd-trace"] = "memd-trace"
VERSION = 1
MAX_LINE_BYTES = 64 * 2**20

Outcome = Literal["stop", "length", "abort", "error", "open"]
Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
Part = TypeVar("Part")
Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]


class TraceError(MemdError):
    """A trace cannot be read; the message names the line, the field and what is wrong."""


@dataclass(frozen=True)
class TracePool:
    """Layout of the pool that served the trace; bytes are those of one page, token or block."""

    page_tokens: Positive
    page_bytes: Positive
    block_bytes: Positive
    capacity_pages: Positive
    token_bytes: Positive | None = None
    pages_per_block: Positive | None = None
    capacity_blocks: Positive | None = None


@dataclass(frozen=True)
class TraceHeader:
    """The first line.

    Args:
        id: Names the recording.
        started_at: Unix seconds; arrivals are counted from it.
        ended_at: Unix seconds; None: it went on, or its daemon died.
        tenants: Whether tenants are digests or names.
        model: Name, fingerprint, dtype, layers, heads and so on.
        pool: Layout.
        settings: Of memory, kv, engine and tenants at its start, by dotted key, in base units.
        dropped: Sequences that are missing, because recording never holds up requests.
        memd: Version that wrote it.
    """

    id: str
    started_at: Seconds
    ended_at: Seconds | None
    tenants: Literal["digest", "name"]
    model: dict[str, Any]
    pool: TracePool
    settings: dict[str, Any]
    dropped: Count = 0
    memd: str = ""
    format: Literal["memd-trace"] = FORMAT
    version: int = VERSION


@dataclass(frozen=True)
class TraceRequest:
    """One sequence; a request with n choices is n of them, of one arrival.

    Args:
        arrival_seconds: After the start of the recording; when it was handed to the engine.
        request: Digest of its request: the same for all choices.
        namespace: Digest; nothing is shared between two namespaces.
        tenant: Digest or name, see the header; "" without one.
        priority: Lower first.
        prompt_tokens: Length of the prompt.
        output_tokens: Generated.
        max_tokens: Most that it might have generated.
        outcome: How it ended; `open`: it had not when the recording ended.
        duration_seconds: From arrival to end.
        pages: Digests of the whole pages that it filled, prompt first; the last output token is
            never computed, so it fills nothing. See `whole_pages`.
        cached_tokens: Of the prompt, found in the cache at its start; None: not known.
    """

    arrival_seconds: Seconds
    request: Digest
    namespace: Digest
    tenant: str
    priority: int
    prompt_tokens: Positive
    output_tokens: Count
    max_tokens: Count
    outcome: Outcome
    duration_seconds: Seconds
    pages: tuple[Digest, ...] = field(default=())
    cached_tokens: Count | None = None


def whole_pages(prompt_tokens: int, output_tokens: int, page_tokens: int) -> int:
    """Pages that a sequence fills."""
    return (prompt_tokens + max(0, output_tokens - 1)) // page_tokens


def encode_line(part: TraceHeader | TraceRequest) -> bytes:
    """One line, with its end."""
    return msgspec.json.encode(part) + b"\n"


def write_trace(out: BinaryIO, header: TraceHeader, requests: Iterable[TraceRequest]) -> int:
    """Write a trace; requests must come by arrival.

    Returns:
        How many requests were written.
    """
    out.write(encode_line(header))
    count = 0
    for request in requests:
        out.write(encode_line(request))
        count += 1
    return count


def read_trace(path: Path) -> tuple[TraceHeader, Iterator[TraceRequest]]:
    """Read a trace file: its header at once, its requests as they are asked for.

    Raises:
        TraceError: the file cannot be read or is no trace; while iterating, a line is invalid.
    """
    try:
        lines = _lines(path)
        header = parse_header(next(lines, b""))
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None
    return header, _requests(path, lines, header)


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while line := file.readline(MAX_LINE_BYTES + 1):
                yield line
    except OSError as error:
        raise TraceError(f"cannot be read: {error.strerror}") from None


def _requests(path: Path, lines: Iterator[bytes], header: TraceHeader) -> Iterator[TraceRequest]:
    try:
        yield from parse_requests(lines, header)
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None


def parse_header(line: bytes) -> TraceHeader:
    """The header of a trace.

    Raises:
        TraceError: it is not one, or of a version that is not known.
    """
    try:
        raw = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raw = None
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise TraceError(f'line 1 is no header of a trace: "format" must be "{FORMAT}"')
    if raw.get("version") != VERSION:
        raise TraceError(f"line 1: version is {raw.get('version')!r}, this memd reads {VERSION}")
    return _convert(raw, TraceHeader, 1)


def parse_requests(lines: Iterable[bytes], header: TraceHeader) -> Iterator[TraceRequest]:
    """The requests of a trace, from the lines after its header; empty lines are passed over.

    Raises:
        TraceError: a line is cut off or invalid, or requests do not come by arrival.
    """
    last = 0.0
    for number, line in enumerate(lines, 2):
        if not line.strip():
            continue
        if len(line) > MAX_LINE_BYTES:
            raise TraceError(f"line {number} is longer than {MAX_LINE_BYTES} bytes")
        try:
            raw = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise TraceError(f"line {number} is no JSON, or cut off: {error}") from None
        request = _convert(raw, TraceRequest, number)
        _check(request, header.pool.page_tokens, last, number)
        last = request.arrival_seconds
        yield request


def _convert(raw: Any, kind: type[Part], number: int) -> Part:
    try:
        return msgspec.convert(raw, kind, strict=True)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$.")
        name = where.rstrip("`")
        raise TraceError(f"line {number}: {f'{name}: ' if name else ''}{what}") from None


def _check(request: TraceRequest, page_tokens: int, last: float, number: int) -> None:
    if request.arrival_seconds < last:
        raise TraceError(
            f"line {number}: arrival_seconds is {request.arrival_seconds:.6f}, before the line "
            f"above, {last:.6f}"
        )
    if request.output_tokens > request.max_tokens:
        raise TraceError(
            f"line {number}: output_tokens is {request.output_tokens}, max_tokens is "
            f"{request.max_tokens}"
        )
    if (request.cached_tokens or 0) > request.prompt_tokens + request.output_tokens:
        raise TraceError(
            f"line {number}: cached_tokens is {request.cached_tokens}, the sequence has "
            f"{request.prompt_tokens + request.output_tokens} tokens"
        )
    pages = whole_pages(request.prompt_tokens, request.output_tokens, page_tokens)
    if len(request.pages) != pages:
        raise TraceError(
            f"line {number}: pages has {len(request.pages)} digests, {request.prompt_tokens} + "
            f"{request.output_tokens} tokens fill {pages} pages of {page_tokens}"
        )
