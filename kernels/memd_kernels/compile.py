"""Compiles every Triton kernel for cards that need not be there, and says what it takes.

`python -m memd_kernels.compile` prints registers, spills and shared memory of each kernel. It takes
part by one function of its module in `memd_kernels.triton`:

    def compile_cases() -> list[CompileCase]: ...

which names the kernel, the types of its arguments in order and the value of each `tl.constexpr`.
Needs a process in which triton compiles: `TRITON_INTERPRET` unset.
"""

import argparse
import importlib
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

ARCHITECTURES = (80, 90, 100)
NO_SPILLS = 90  # the architecture whose tables are tuned; elsewhere a spill is shown only


class CompileCase(NamedTuple):
    """One specialisation of a kernel.

    `signature` has the arguments that are not constexpr, by name: Triton's type (`*bf16`, `i32`),
    with `:16` behind it for a pointer or number known to be a multiple of 16, as a launch finds out
    by itself. `architectures` are those the kernel is for. OVERLAP, where a kernel has it and it is
    not given, follows from the architecture (see `memd_kernels.triton.overlap`).
    """

    kernel: Any  # what triton.jit made
    signature: dict[str, str]
    constexprs: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    architectures: tuple[int, ...] = ARCHITECTURES


@dataclass(frozen=True)
class Compiled:
    """What a kernel takes; `error` when it does not compile."""

    module: str
    kernel: str
    case: str
    architecture: int
    registers: int = 0
    spilled_bytes: int = 0  # of a thread's stack: spills, and arrays indexed at run time
    shared_bytes: int = 0
    error: str = ""

    @property
    def failed(self) -> bool:
        """Does not compile, or spills where kernels must not."""
        return bool(self.error) or (self.architecture == NO_SPILLS and self.spilled_bytes > 0)


def find_cases(module_name: str | None = None) -> Iterator[tuple[str, CompileCase]]:
    """The cases of all kernel modules, or of one, with the name of their module."""
    package = importlib.import_module("memd_kernels.triton")
    for info in pkgutil.iter_modules(package.__path__):
        if module_name in (None, info.name):
            module = importlib.import_module(f"{package.__name__}.{info.name}")
            for case in getattr(module, "compile_cases", list)():
                yield info.name, case


def compile_case(module: str, case: CompileCase, architecture: int) -> Compiled:
    """Compile one case for one architecture, such as 90 for compute capability 9.0."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    names = case.kernel.arg_names
    signature, attributes = {}, {}
    for index, name in enumerate(names):
        kind, _, multiple = case.signature.get(name, "constexpr").partition(":")
        signature[name] = kind
        if multiple:
            attributes[(index,)] = [["tt.divisibility", int(multiple)]]
    constexprs = dict(case.constexprs)
    if "OVERLAP" in names:
        constexprs.setdefault("OVERLAP", architecture >= 90)
    constants = {(names.index(name),): value for name, value in constexprs.items()}
    label = ",".join(str(value) for value in case.constexprs.values())
    label += f" w{case.num_warps} s{case.num_stages}"
    done = Compiled(module, case.kernel.__name__, label, architecture)
    try:
        source_type = GluonASTSource if case.kernel.is_gluon() else ASTSource
        source = source_type(case.kernel, signature, constants, attributes)
        options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
        binary = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
        registers, stack = _resources(binary.asm["cubin"])
    except Exception as error:  # a compiler fails in many ways; each is a row of the table
        text = (str(error).strip().splitlines() or [""])[-1]
        return replace(done, error=f"{type(error).__name__}: {text}")
    return replace(
        done,
        registers=registers,
        spilled_bytes=stack,
        shared_bytes=binary.metadata.shared,
    )


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers, and bytes of stack and local memory, of the one kernel in a cubin."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return found["REG"], found["STACK"] + found["LOCAL"]


def main(arguments: list[str] | None = None) -> int:
    """Print a row for each case and architecture; 1 if one failed."""
    parser = argparse.ArgumentParser(prog="memd_kernels.compile", description=__doc__)
    parser.add_argument("--architecture", type=int, nargs="+", default=ARCHITECTURES)
    parser.add_argument("--module", help="one module of memd_kernels.triton; default: all")
    parser.add_argument("--first", action="store_true", help="one case of each kernel")
    options = parser.parse_args(arguments)
    out = sys.stdout
    out.write(f"{'sm':>4} {'registers':>9} {'spilled':>7} {'shared':>7}  kernel\n")
    failures = total = 0
    seen: set[tuple[str, str, int]] = set()
    for module, case in find_cases(options.module):
        for architecture in sorted({*options.architecture} & {*case.architectures}):
            name = (module, case.kernel.__name__, architecture)
            if options.first and name in seen:
                continue
            seen.add(name)
            row = compile_case(module, case, architecture)
            total += 1
            failures += row.failed
            out.write(
                f"{row.architecture:>4} {row.registers:>9} {row.spilled_bytes:>7} "
                f"{row.shared_bytes:>7}  {module}.{row.kernel} {row.case} {row.error}\n"
            )
            out.flush()
    out.write(f"{total} compiled, {failures} failed\n")
    return 1 if failures or not total else 0


if __name__ == "__main__":
    sys.exit(main())
