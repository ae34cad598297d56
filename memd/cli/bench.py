"""`memd bench`: how fast this machine generates."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memd.bench.cases import CASES, listen
from memd.cli.common import Format, FormatOption, emit, print_table, say

if TYPE_CHECKING:
    from memd.bench.offline import OfflineBench

app = typer.Typer(help="How fast this machine generates.", no_args_is_help=True)


@app.command()
def offline(
    model: Annotated[
        str | None, typer.Option("--model", help="As `memd serve`; default: the demo model.")
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option("--shape", help="Random weights instead: llama8b, smol135m (bfloat16)."),
    ] = None,
    case: Annotated[
        list[str] | None, typer.Option("--case", help=f"Of {', '.join(CASES)}; default: all.")
    ] = None,
    runs: Annotated[int, typer.Option("--runs", min=1, help="Besides a warm-up.")] = 3,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", help="key=value settings, as `memd serve`.")
    ] = None,
    read_limit: Annotated[
        float | None, typer.Option(help="Of the card, bytes a second, for the floor.")
    ] = None,
    matmul_limit: Annotated[
        float | None, typer.Option(help="Of the card, operations a second, for the floor.")
    ] = None,
    listening: Annotated[
        bool, typer.Option("--listen", help="Run the cases that standard input names.")
    ] = False,
    fmt: FormatOption = Format.TABLE,
) -> None:
    """Throughput of the engine in this process, without HTTP: all requests at once, greedy.

    With both limits, `floor` is the least time that the card allows over the time taken.
    """
    from memd.bench.offline import measure

    names = case or list(CASES)
    for name in names:
        if name not in CASES:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(CASES)}", param_hint="--case")
    bench = _bench(model, shape, assignments or [])
    if listening:
        listen(lambda each: bench.run(each).seconds)
        return
    rows: list[dict[str, Any]] = []
    for name in names:
        rows.append({"case": name, **measure(bench, CASES[name], runs, read_limit, matmul_limit)})
        say(f"{name}: {rows[-1]['output_tokens_per_second']:,.1f} output tokens/s")
    emit({"rows": rows}, fmt, lambda: _print(rows))


def _bench(model: str | None, shape: str | None, assignments: list[str]) -> "OfflineBench":
    from memd.bench.offline import OfflineBench
    from memd.bench.shapes import SHAPES
    from memd.config_sources import load

    if shape is not None and shape not in SHAPES:
        raise typer.BadParameter(f"{shape!r} is none of {', '.join(SHAPES)}", param_hint="--shape")
    given = [f"model.path={json.dumps(model)}"] if model is not None else []
    return OfflineBench(load(assignments=[*given, *assignments]), shape)


def _print(rows: list[dict[str, Any]]) -> None:
    columns = ("case", "requests", "in", "out", "output tokens/s", "least", "most")
    print_table(
        (*columns, "ms a step", "host ms", "floor"),
        [
            (
                *(row[key] for key in ("case", "requests", "prompt_tokens", "output_tokens")),
                round(row["output_tokens_per_second"], 1),
                round(row["least_output_tokens_per_second"], 1),
                round(row["most_output_tokens_per_second"], 1),
                round(row["step_seconds"] * 1e3, 2),
                round(row["host_seconds_per_step"] * 1e3, 2),
                row["floor_ratio"] and round(row["floor_ratio"], 2),
            )
            for row in rows
        ],
    )
