"""The form of a trace: what is written is read again, and what is wrong is named."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from memd.simulate.trace import (
    TraceError,
    TraceHeader,
    TracePool,
    TraceRequest,
    encode_line,
    read_trace,
    whole_pages,
    write_trace,
)

HEADER = TraceHeader(
    id="t",
    started_at=1000.0,
    ended_at=1010.0,
    tenants="digest",
    model={"name": "tiny"},
    pool=TracePool(page_tokens=16, page_bytes=1024, block_bytes=16384, capacity_pages=64),
    settings={"memory.watermark.high": 0.9},
)


def request(arrival: float, prompt: int = 20, output: int = 3, **more: Any) -> TraceRequest:
    pages = tuple(f"{at:016x}" for at in range(whole_pages(prompt, output, 16)))
    values = {"max_tokens": 8, "outcome": "stop", "duration_seconds": 1.0, "pages": pages}
    values |= {"request": "0" * 16, "namespace": "1" * 16, "tenant": "", "priority": 0}
    return TraceRequest(arrival, prompt_tokens=prompt, output_tokens=output, **values | more)


def written(tmp_path: Path, *lines: bytes) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"".join(lines))
    return path


def test_what_is_written_is_read_again(tmp_path):
    requests = [request(0.5), request(0.5, 33, 0, cached_tokens=16, tenant="acme"), request(2.0)]
    out = io.BytesIO()
    assert write_trace(out, HEADER, requests) == 3
    header, read = read_trace(written(tmp_path, out.getvalue()))
    assert header == HEADER
    assert list(read) == requests


def test_more_fields_than_are_known_and_empty_lines_do_no_harm(tmp_path):
    line = json.loads(encode_line(request(1.0))) | {"later": 1}
    path = written(tmp_path, encode_line(HEADER), b"\n", json.dumps(line).encode())
    assert list(read_trace(path)[1]) == [request(1.0)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prompt_tokens": 0}, "line 3: prompt_tokens: Expected `int` >= 1"),
        ({"prompt_tokens": "9"}, "line 3: prompt_tokens: Expected `int`, got `str`"),
        ({"arrival_seconds": 0.25}, "line 3: arrival_seconds is 0.250000, before the line above"),
        ({"outcome": "won"}, "line 3: outcome: "),
        ({"namespace": "xyz"}, "line 3: namespace: "),
        (
            {"pages": ["0" * 16, "1" * 16]},
            "line 3: pages has 2 digests, 20 + 3 tokens fill 1 pages",
        ),
        ({"pages": ["0" * 15]}, "line 3: pages[0]: "),
        ({"output_tokens": 9}, "line 3: output_tokens is 9, max_tokens is 8"),
        ({"cached_tokens": 99}, "line 3: cached_tokens is 99"),
        ({"tenant": None}, "line 3: tenant: "),
    ],
)
def test_an_invalid_line_is_named_with_its_field(tmp_path, change, said):
    line = json.dumps(json.loads(encode_line(request(1.0))) | change).encode()
    path = written(tmp_path, encode_line(HEADER), encode_line(request(0.5)), line)
    with pytest.raises(TraceError) as caught:
        list(read_trace(path)[1])
    assert str(caught.value).startswith(f"{path}: {said}")


def test_a_missing_field_and_a_cut_line_are_named(tmp_path):
    line = json.loads(encode_line(request(1.0)))
    del line["priority"]
    path = written(tmp_path, encode_line(HEADER), json.dumps(line).encode())
    with pytest.raises(TraceError, match=r"line 2: .*`priority`"):
        list(read_trace(path)[1])
    path = written(tmp_path, encode_line(HEADER), encode_line(request(1.0))[:-9])
    with pytest.raises(TraceError, match="line 2 is no JSON, or cut off"):
        list(read_trace(path)[1])


@pytest.mark.parametrize(
    ("first", "said"),
    [
        (b"", "no header of a trace"),
        (b"\xff\xfe\n", "no header of a trace"),
        (b'{"format": "other"}\n', "no header of a trace"),
        (
            encode_line(HEADER).replace(b'"version":1', b'"version":2'),
            "version is 2, this memd reads 1",
        ),
        (
            encode_line(HEADER).replace(b'"page_tokens":16', b'"page_tokens":0'),
            "pool.page_tokens: ",
        ),
        (encode_line(HEADER).replace(b'"started_at":1000.0', b'"began":1'), "`started_at`"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path, first, said):
    with pytest.raises(TraceError) as caught:
        read_trace(written(tmp_path, first))
    assert said in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(TraceError, match=r"nothing: cannot be read: No such file"):
        read_trace(tmp_path / "nothing")
