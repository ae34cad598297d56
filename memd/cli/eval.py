"""`memd eval`: what a KV format or a window costs in quality, and saves in memory."""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from memd.cli.common import Format, FormatOption, count_progress, emit, print_table
from memd.errors import RequestError
from memd.units import format_size


def evaluate(
    model: Annotated[str, typer.Argument(help="Directory, GGUF file, hub name or demo name.")],
    text: Annotated[
        Path,
        typer.Option("--text", exists=True, dir_okay=False, readable=True, help="In UTF-8."),
    ],
    tokens: Annotated[
        int | None,
        typer.Option("--tokens", help="Of the text, from its beginning. Default: 4096 or less."),
    ] = None,
    kv: Annotated[
        str | None,
        typer.Option(
            "--kv",
            help="Formats: full, int8, int4, fp8. Default: full,int8,int4; with a budget full.",
        ),
    ] = None,
    full_precision_tokens: Annotated[
        int, typer.Option(help="First tokens that are never packed.")
    ] = 128,
    recent_tokens: Annotated[int, typer.Option(help="Last tokens that are not packed yet.")] = 128,
    window: Annotated[
        int | None,
        typer.Option("--window", help="Tokens that each sees, itself too. Default: all."),
    ] = None,
    sinks: Annotated[
        int, typer.Option("--sinks", help="First tokens kept besides the window or budget.")
    ] = 0,
    budget: Annotated[
        int | None,
        typer.Option("--budget", help="Most tokens held, in whole pages. Default: all."),
    ] = None,
    drop: Annotated[
        str | None,
        typer.Option("--drop", help="What a budget lets go of: recency, attention_share, or both."),
    ] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", help="key=value settings, as `memd serve`.")
    ] = None,
    fmt: FormatOption = Format.TABLE,
) -> None:
    """Perplexity, agreement and memory of KV formats, against full precision on the same text.

    Runs in this process, with the decoder and the attention that serving uses, as one sequence.
    """
    # As engines are started; read when torch is loaded. Threads that spin while they wait take the
    # processor from each other on a busy machine.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    from memd.config_sources import load
    from memd.evaluate.policy import KVPolicy, read_drop_policies, read_formats
    from memd.evaluate.report import evaluate as measure

    try:
        lengths = full_precision_tokens, recent_tokens, window, sinks, budget
        policies = [
            KVPolicy(name, *lengths, policy)
            for name in read_formats(kv or ("full,int8,int4" if budget is None else "full"))
            for policy in read_drop_policies(drop, budget)
        ]
        settings = load(assignments=[f"model.path={json.dumps(model)}", *(assignments or [])])
        with count_progress("tokens") as progress:
            report = measure(settings, text, tokens, policies, progress)
    except RequestError as error:
        raise typer.BadParameter(error.message, param_hint=f"--{error.param}") from None
    emit(report, fmt, lambda: _print(report))


def _print(report: dict[str, Any]) -> None:
    facts = (f"{report['tokens']} tokens", report["dtype"], f"pages of {report['page_tokens']}")
    typer.echo(f"{report['model']}: {', '.join(facts)}")
    columns = ("kv", "holds", "perplexity", "rise", "agreement", "divergence", "KV memory")
    print_table(
        (*columns, "times less", "than bfloat16"),
        [
            (
                row["kv"],
                _seen(row),
                row["perplexity"] and round(row["perplexity"], 3),
                row["rise"] if row["rise"] is None else f"{row['rise']:+.2%}",
                f"{row['agreement']:.1%}",
                row["divergence"] if row["divergence"] is None else f"{row['divergence']:.4f} nats",
                format_size(row["kv_bytes"]),
                round(row["ratio"], 2),
                round(row["bfloat16_ratio"], 2),
            )
            for row in report["rows"]
        ],
    )


def _seen(row: dict[str, Any]) -> str:
    """Tokens that each sees: sinks and window, or a budget and what goes first."""
    if row["budget"]:
        return f"{row['budget']} by {row['drop'].replace('_', ' ')}"
    if not row["window"]:
        return "all"
    return f"{row['sinks']} + {row['window']}" if row["sinks"] else str(row["window"])
