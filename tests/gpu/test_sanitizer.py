"""compute-sanitizer over the kernels: no access outside memory, no race in shared memory.

Runs tests of `tests/kernels` in a process of its own, those that launch each kernel with odd
lengths over NaN-filled memory at the least cost: racecheck is a hundred times slower. Alone:

    compute-sanitizer --tool racecheck --error-exitcode 9 python -m pytest -q TESTS
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
TOOL = shutil.which("compute-sanitizer")
FOUND = 9  # an exit status that pytest does not use
PATHS = (".", "kernels", "tests/support")
KERNELS = ROOT / "kernels/memd_kernels/triton"
# Where Triton hands arguments and work over to the other warps of a warp-specialised kernel. Its
# code for it orders all of that by barriers of the whole block (read in the machine code), which
# racecheck does not put together where warps reach them at different instructions.
HAND_OVER = ("def prefill_hopper_kernel(", "gl.warp_specialize(")

SELECTED = {
    "early_decode": ["what_the_kernel_before_writes[lens0]"],
    "host_pages": ["pages_land_where_they_should[19-16432]"],
    "shares": ["triton_divides_a_parts_share_among_its_pages[3-1-64-270-dtype1-300]"],
    "sinks": [
        "decode[7-17-decode_attention1]",
        "rotation_of_queries_is_that_of_rope_and_store[20-True]",
    ],
    "triton_decode": [
        "decode[8-2-40-32-20-dtype2]",
        "decode[4-1-128-128-70-dtype6]",
        "shared_prefix[3-dtype1-30]",
        "many_parts_are_put_together_in_two_stages[290]",
    ],
    "triton_elementwise": [
        "rms_norm_of_rows_that_are_not_dense",
        "silu_mul[3-dtype0]",
        "rope_and_store[True-index0-24-12-dtype1]",
        "move_pages[dtype1-7]",
    ],
    "triton_flash": ["matches_reference[37-3-1-16-True-9]"],
    "triton_invariant": ["product[dtype0-136-True]", "attention[20-4-dtype3]"],
    "triton_linear": ["product[True-3-5-40-72-dtype1]"],
    "triton_packed": [
        "pages_are_packed_as_in_plain_torch[64-24-int8]",
        "pages_are_packed_as_in_plain_torch[64-24-int4]",
        "pages_are_packed_as_in_plain_torch[64-24-fp8]",
        "packed_pages_are_moved",
        "decode_over_both_formats[int8-shuffled-70-16-24-dtype1]",
        "decode_over_both_formats[int4-middle-90-64-80-dtype2]",
        "decode_over_both_formats[fp8-all-40-32-40-dtype5]",
        "a_shared_prefix_may_be_packed[int8-30]",
    ],
    "triton_prefill": [
        "matches_reference[64-80-9]",
        "every_cut_gives_the_same[config2-None-dtype0]",
        "the_hopper_kernel[no overlap]",
        "the_hopper_kernel[unpacked]",
    ],
    "triton_sample": [
        "draws_beyond_the_buffer",
        "broken_rows_are_reported_and_leave_others_alone",
        "argmax_takes_the_lowest_of_equal_ids",
    ],
}
TESTS = [
    f"tests/kernels/test_{file}.py::test_{test}"
    for file, tests in SELECTED.items()
    for test in tests
]


def test_what_is_selected_is_there(request: pytest.FixtureRequest) -> None:
    """The functions always; where their cases are collected in this run, these too."""
    collected = {item.nodeid for item in request.session.items}
    functions = {nodeid.partition("[")[0] for nodeid in collected}
    for test in TESTS:
        function = test.partition("[")[0]
        path, _, name = function.partition("::")
        assert f"def {name}(" in (ROOT / path).read_text()
        assert function not in functions or test in collected


def races(told: str) -> list[str]:
    """Accesses that racecheck reports, but for those of the hand-over."""
    found = []
    for access, file, line in re.findall(r"access at (\S+) in (\S+?):(\d+)", told):
        path = KERNELS / file
        text = path.read_text().splitlines()[int(line) - 1].strip() if path.is_file() else ""
        if text not in HAND_OVER:
            found.append(f"{access} in {file}:{line} {text}")
    return found


def test_races_of_the_hand_over_alone_are_known() -> None:
    source = (KERNELS / "prefill_hopper.py").read_text().splitlines()
    lines = [source.index(next(x for x in source if x.strip() == each)) + 1 for each in HAND_OVER]
    reported = "".join(
        f"Race reported between Read access at k+0x130 in prefill_hopper.py:{lines[0]}\n"
        f"    and Write access at k+0x104a0 in prefill_hopper.py:{line} [47 hazards]\n"
        for line in lines
    )
    assert races(reported) == []
    other = "Race reported between Write access at k+0x20 in prefill_hopper_consumer.py:99\n"
    assert len(races(reported + other)) == 1
    assert len(races("Read access at k+0x20 in prefill_hopper.py:1\n")) == 1
    assert len(races("Read access at k+0x20 in nowhere.py:1\n")) == 1


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.skipif(TOOL is None, reason="compute-sanitizer is not installed")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_kernels_are_clean(tool: str, record_property: Callable[[str, object], None]) -> None:
    assert TOOL is not None
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [*(str(ROOT / each) for each in PATHS), os.environ.get("PYTHONPATH", "")]
        ),
        # Each tensor an allocation of its own: what lies beside it is then out of bounds.
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    }
    command = [TOOL, "--tool", tool, "--error-exitcode", str(FOUND)]
    command += [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "--rootdir", str(ROOT)]
    command += ["--import-mode=importlib", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, *TESTS], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    told = done.stdout + done.stderr
    if tool == "memcheck":
        assert done.returncode == 0, told[-4000:]
    assert done.returncode in (0, FOUND), told[-4000:]
    errors = [line for line in told.splitlines() if "= Error" in line]
    assert all("Race reported" in line for line in errors)
    assert bool(errors) == (done.returncode == FOUND)
    assert not races(told)
    assert " failed" not in told
    record_property("table", "\n".join(line for line in told.splitlines() if "SUMMARY" in line))
    assert " passed" in told
