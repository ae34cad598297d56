"""Requests nobody should send, and what a daemon answers to them.

    python tests/support/fuzz.py --count 100000 [--seed 1]

starts a daemon with a tiny model and tells every request that got a 500 or worse. The n-th request
of a seed is always the same one.
"""

import argparse
import http.client
import json
import random
import socket
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from served import Daemon, serving
from tiny import write_model

EXPECTED = {200, 400, 404, 405, 408, 409, 413, 431}
LIMITS = (
    *("memory.limit=2048 tokens", "memory.page_tokens=16", "server.max_choices=4"),
    "server.max_body=256KB",
)
THREADS = 8
ANSWER_SECONDS = 30.0
_MAX_POSITION = 256

_NASTY: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 3.5, -0.0, 1e308, 1e-320, 2**31, 2**63 - 1, 2**63, 2**64),
    *(-(2**63), -(2**63) - 1, 10**40, "", "0", "1", "null", "NaN", "\x00", "a\x00b", "\ufeff"),
    *("\U0001f600" * 3, "e\u0301", "\u202e", "../../etc/passwd", "%s%n", "{{7*7}}", "a" * 3000),
    *("<|bos|>", "<|end|>", [], [[]], [None], [0], [-1], [257], [258], [2**40], [[1, 2], [3]]),
    *([1, "a"], ["a", "b"], ["x"] * 200, [0] * 300, {}, {"a": 1}, {"type": "text"}, {"": None}),
    *({"1": 100}, {"-1": 1}, {"999999999999": 1}, {"1": "x"}, {"type": "json_object"}, [{}]),
)
_COMMON = (
    *("model", "n", "max_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty"),
    *("frequency_penalty", "repetition_penalty", "logit_bias", "seed", "stop", "stop_token_ids"),
    *("include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens", "stream"),
    *("stream_options", "priority", "cache_salt", "request_id", "session_id", "return_token_ids"),
    *("tools", "functions", "response_format", "modalities", "suffix", "tool_choice", "user"),
)
_FIELDS = {
    "/v1/completions": (*_COMMON, "prompt", "best_of", "echo", "logprobs"),
    "/v1/chat/completions": (
        *(*_COMMON, "messages", "max_completion_tokens", "logprobs", "top_logprobs"),
        *("add_generation_prompt", "continue_final_message", "chat_template_kwargs"),
    ),
    "/tokenize": ("model", "prompt", "messages", "add_special_tokens", "add_generation_prompt"),
    "/detokenize": ("model", "tokens"),
    "/admin/v1/settings": (
        *("revision", "reason", "changes", "who", "source", "reset", "persist"),
        "revert_after_seconds",
    ),
    "/admin/v1/settings/preview": ("changes", "reset", "persist"),
    "/admin/v1/settings/undo": ("reason", "who", "source", "revision"),
    "/admin/v1/settings/confirm": ("revision", "who", "source"),
    "/admin/v1/settings/reload": ("reason", "who", "source"),
    "/admin/v1/pool/reclaim": ("pages",),
    "/admin/v1/debug/faults": ("seed", "fail_commits", "fail_restores", "requests"),
}
_METHOD_OF = {"/admin/v1/settings": "PATCH", "/admin/v1/debug/faults": "PUT"}
_WEIGHTED = ("/v1/completions", "/v1/chat/completions") * 4 + tuple(_FIELDS)
_LIVE = (
    *("memory.watermark.high", "memory.watermark.low", "memory.reclaim_pages_per_step"),
    *("memory.regret_window", "engine.max_batch_tokens", "engine.reserve_tokens", "server.port"),
)
_BARE = (
    *("/v1/models", "/v1/models/tiny", "/v1/models/x", "/health", "/health/live", "/health/ready"),
    *("/metrics", "/version", "/openapi.json", "/admin/v1/status", "/admin/v1/pool"),
    *("/admin/v1/pool/blocks", "/admin/v1/prefixes", "/admin/v1/requests", "/admin/v1/settings"),
    *("/admin/v1/requests/x", "/admin/v1/requests/x/preempt", "/admin/v1/settings/history"),
    *("/admin/v1/pool/flush", "/admin/v1/pool/audit", "/", "/v1", "/nothing"),
)
_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "BREW", "get")
_QUERIES = (
    *("offset=-1", "offset=x", "limit=0", "limit=10001", "offset=99999999999999999999999", "a=b"),
    *("limit=1&limit=2", "%00", "%ff", "offset=1&limit=5", "=", "&&", "limit=%31", "?" * 20),
)
_HEADERS: tuple[tuple[bytes, bytes], ...] = (
    *((b"x-request-id", value) for value in (b"", b"a b", b"\xff\xfe", b"x" * 5000, b"ok-1")),
    *((b"content-type", value) for value in (b"", b"text/plain", b"multipart/form-data", b"\xff")),
    *((b"accept", value) for value in (b"", b"*/*", b"text/event-stream", b"a;q=9", b"\xe9")),
    *((b"authorization", value) for value in (b"", b"Bearer", b"Bearer \xff", b"Basic eDp5")),
    *((b"content-encoding", b"gzip"), (b"expect", b"100-continue"), (b"range", b"bytes=0-1")),
    *((b"host", b"\xff"), (b"origin", b"null"), (b"x-forwarded-for", b"' or 1=1"), (b"te", b"x")),
    *((b"cookie", b"a=" + b"b" * 9000), (b"upgrade", b"h2c"), (b"connection", b"upgrade")),
)


@dataclass(frozen=True)
class Fuzzed:
    """One request as bytes.

    Args:
        method: As sent.
        raw: All of it.
        hangs_up: The client does not wait for the answer.
        lies: Its length is not the one told, so the server may wait for more.
    """

    method: str
    raw: bytes
    hangs_up: bool
    lies: bool


def request(seed: int, index: int) -> Fuzzed:
    """The request of this number."""
    chance = random.Random(f"{seed} {index}")
    if chance.random() < 0.2:
        path, body = chance.choice(_BARE), b""
        method = chance.choice(_METHODS) if chance.random() < 0.5 else "GET"
    else:
        path = chance.choice(_WEIGHTED)
        method = _METHOD_OF.get(path, "POST")
        body = _body(chance, path)
    if chance.random() < 0.1:
        method = chance.choice(_METHODS)
    if chance.random() < 0.2:
        path = _bent_path(chance, path)
    lies = chance.random() < 0.03
    raw = _framed(chance, method, path, body, lies)
    return Fuzzed(method, raw, chance.random() < 0.05, lies)


def _valid(chance: random.Random, path: str) -> dict[str, Any]:
    if path == "/v1/completions":
        return {"model": "tiny", "prompt": chance.choice(("hi", [1, 2, 3])), "max_tokens": 4}
    if path == "/v1/chat/completions":
        messages = [{"role": "user", "content": "hi"}]
        return {"model": "tiny", "messages": messages, "max_tokens": 4}
    if path == "/admin/v1/settings":
        changes = {chance.choice(_LIVE): chance.choice((*_NASTY, "85%", "60%", 32, "1h"))}
        return {"revision": chance.randrange(9), "reason": "fuzz", "changes": changes}
    if path == "/admin/v1/settings/preview":
        return {"changes": {chance.choice(_LIVE): chance.choice((*_NASTY, "85%"))}}
    if path == "/admin/v1/settings/undo":
        return {"reason": "fuzz"}
    if path == "/admin/v1/settings/confirm":
        return {"revision": chance.randrange(9)}
    return {"/tokenize": {"prompt": "hi"}, "/detokenize": {"tokens": [1, 2]}}.get(path, {})


def _body(chance: random.Random, path: str) -> bytes:
    body: Any = _valid(chance, path)
    kind = chance.random()
    if kind < 0.75:
        for _ in range(chance.choice((0, 0, 1, 1, 1, 2, 3))):
            body[chance.choice(_FIELDS[path])] = _value(chance)
        if chance.random() < 0.1:
            body.pop(chance.choice(list(body)), None) if body else None
    elif kind < 0.85:
        body = chance.choice((*_NASTY, [body], {"body": body}, json.dumps(body)))
    encoded = json.dumps(body).encode()
    return _bent_bytes(chance, encoded) if kind >= 0.85 else encoded


def _value(chance: random.Random, depth: int = 0) -> Any:
    kind = chance.random()
    if kind < 0.7 or depth > 2:
        return chance.choice(_NASTY)
    if kind < 0.8:
        role = chance.choice(("user", "assistant", "system", "tool", "x", None, 1))
        return [{"role": role, "content": _value(chance, depth + 1)}] * chance.choice((1, 2, 50))
    if kind < 0.9:
        return [_value(chance, depth + 1) for _ in range(chance.randrange(4))]
    return {str(chance.choice(_NASTY))[:40]: _value(chance, depth + 1)}


def _bent_bytes(chance: random.Random, encoded: bytes) -> bytes:
    at = chance.randrange(len(encoded) + 1)
    return chance.choice(
        (
            encoded[:at],
            encoded[:at] + chance.randbytes(chance.randrange(1, 9)) + encoded[at:],
            encoded + encoded,
            b"\xef\xbb\xbf" + encoded,
            encoded.replace(b'"', b"'"),
            encoded.replace(b"4", b"4e999"),
            encoded.replace(b"4", b"NaN"),
            encoded.replace(b'"hi"', b'"\\ud800"'),
            b"[" * 5000,
            b'{"a":' * 3000 + b"1" + b"}" * 3000,
            encoded + b" " * 300_000,
            encoded.decode().encode("utf-16"),
        )
    )


def _bent_path(chance: random.Random, path: str) -> str:
    at = chance.randrange(len(path) + 1)
    return chance.choice(
        (
            path + "?" + chance.choice(_QUERIES),
            path + "?" + chance.choice(_QUERIES),
            path + "/",
            "/" + path,
            path.upper(),
            path[:at] + chance.choice(("%00", "%2f", "%ff", "%", "..", "//", ";", "\u00e9")),
            path + "/" + "%41" * 500,
            path + "#" + path,
            "http://other.example" + path,
            "*",
            path.replace("/", "/./"),
            path + "/" + "x" * 20_000,
        )
    )


def _framed(chance: random.Random, method: str, path: str, body: bytes, lies: bool) -> bytes:
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    headers += chance.sample(_HEADERS, chance.choice((0, 0, 0, 1, 2)))
    if lies:
        length = chance.choice((b"-1", b"x", b"9" * 30, b"1", b"%d" % (len(body) + 5), b"0"))
        headers.append((b"content-length", length))
    elif chance.random() < 0.08:
        cut = chance.randrange(len(body) + 1)
        parts = [part for part in (body[:cut], body[cut:]) if part]
        headers.append((b"transfer-encoding", b"chunked"))
        body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    elif body or method not in ("GET", "HEAD"):
        headers.append((b"content-length", b"%d" % len(body)))
    lines = b"".join(b"%s: %s\r\n" % header for header in headers)
    return f"{method} {path} HTTP/1.1\r\n".encode() + lines + b"\r\n" + body


def ask(address: tuple[str, int], fuzzed: Fuzzed) -> int | str:
    """The status answered, `closed` when the server hung up, `left` when the client did."""
    with socket.create_connection(address, ANSWER_SECONDS) as connection:
        # A reset at the end, or 10^5 closed connections would use up the ports of the machine.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        try:
            connection.sendall(fuzzed.raw)
            if fuzzed.hangs_up:
                return "left"
            if fuzzed.lies:
                connection.shutdown(socket.SHUT_WR)
            response = http.client.HTTPResponse(connection, method=fuzzed.method)
            response.begin()
            response.read()
            return response.status
        except TimeoutError:
            return "silent"
        except (OSError, http.client.HTTPException):
            return "closed"


def run(daemon: Daemon, seed: int, indices: Iterable[int]) -> tuple[Counter[int | str], list[str]]:
    """Send requests, several at a time.

    Returns:
        How often each outcome came, and a line for each that should not have been.
    """
    host, port = daemon.url.removeprefix("http://").split(":")

    def send(index: int) -> tuple[int, int | str]:
        return index, ask((host, int(port)), request(seed, index))

    outcomes: Counter[int | str] = Counter()
    faults = []
    with ThreadPoolExecutor(THREADS) as threads:
        for index, outcome in threads.map(send, indices):
            outcomes[outcome] += 1
            if outcome not in EXPECTED | {"closed", "left"}:
                faults.append(f"{index}: {outcome}: {request(seed, index).raw[:600]!r}")
    return outcomes, faults


def main() -> int:
    """Fuzz a daemon of its own; 1 when anything went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        model = write_model(Path(name) / "tiny", max_position=_MAX_POSITION)
        with serving(Path(name), str(model), *LIMITS) as daemon:
            indices = range(arguments.start, arguments.start + arguments.count)
            outcomes, faults = run(daemon, arguments.seed, indices)
            daemon.assert_idle()
    sys.stdout.write("\n".join([*faults[:50], f"{len(faults)} faults", str(outcomes), ""]))
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
