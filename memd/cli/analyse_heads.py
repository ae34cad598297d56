"""`memd analyse-heads`: KV heads that could be shared, what that saves and what it costs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from memd.cli.common import Format, FormatOption, emit, print_fields, print_table, say, show
from memd.errors import MemdError, OutOfDeviceMemory

if TYPE_CHECKING:
    from memd.analysis.shared_heads import Found, Option
    from memd.models.config import ModelConfig
    from memd.models.hub import ModelFiles

DEFAULT_TOKENS = 2048


def analyse_heads(
    model: Annotated[str, typer.Argument(help="Directory, GGUF file, hub or demo name.")],
    text: Annotated[
        Path,
        typer.Option("--text", exists=True, dir_okay=False, help="UTF-8, of the kind served."),
    ],
    tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens",
            min=64,
            help=f"Of the text; heads are compared over the first half, and the cost is measured "
            f"over the second. Default: {DEFAULT_TOKENS}, or all of a shorter text.",
        ),
    ] = None,
    threshold: Annotated[
        float,
        typer.Option(
            "--threshold", min=0, max=1, help="Least similarity of heads that are put together."
        ),
    ] = 0.9,
    heads: Annotated[
        int | None,
        typer.Option("--heads", min=1, help="KV heads to be left, however alike the others are."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", dir_okay=False, help="Write the plan, for model.shared_heads."),
    ] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option("--device", help="Where the model runs.")
    ] = "auto",
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], typer.Option("--dtype")
    ] = "auto",
    fmt: FormatOption = Format.TABLE,
) -> None:
    """Compare what KV heads attend to, and find those that one head could stand for."""
    from memd.models.head_plan import write_plan
    from memd.models.hub import read_config, resolve

    files = resolve(model)
    config = read_config(files)
    if heads is not None and heads >= config.num_kv_heads:
        raise typer.BadParameter(
            f"is {heads}, must be below the model's {config.num_kv_heads} KV heads",
            param_hint="--heads",
        )
    found = _analyse(
        files, config, _read(text, files, config, tokens), threshold, heads, device, dtype
    )
    if out is not None:
        if found.plan is None:
            raise MemdError(
                f"no KV heads are alike to {threshold:g} in every layer, so there is no plan to "
                f"write; the most alike reach {found.options[0].least_similarity:.3f}"
                if found.options
                else f"{files.name} has one KV head a layer: there is nothing to share"
            )
        write_plan(found.plan, out)
        say(f"serve with it: memd serve --model {model} --set model.shared_heads={out}")
    report = _report(files.name, found, threshold, out)
    emit(report, fmt, lambda: _print(report))


def _read(text: Path, files: "ModelFiles", config: "ModelConfig", tokens: int | None) -> list[int]:
    """Token ids of the text, as many as are wanted."""
    from memd.models.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(files, config)
    if tokenizer is None:
        raise MemdError(f"{files.name} has no tokenizer, which the text needs")
    try:
        content = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MemdError(f"{text} cannot be read as UTF-8: {error}") from None
    longest = 2 * config.max_position
    if tokens is not None and tokens > longest:
        raise typer.BadParameter(
            f"is {tokens}, the limit is {longest}: two texts of the model's length",
            param_hint="--tokens",
        )
    wanted = tokens or min(DEFAULT_TOKENS, longest)
    found = tokenizer.encode(content, True)[:wanted]
    least = tokens or 64
    if len(found) < least:
        raise MemdError(f"{text} has {len(found)} tokens, {least} are needed")
    return found


def _analyse(
    files: "ModelFiles",
    config: "ModelConfig",
    token_ids: list[int],
    threshold: float,
    heads: int | None,
    device: str,
    dtype: str,
) -> "Found":
    import torch

    from memd.analysis.shared_heads import HeadAnalysis
    from memd.config import build
    from memd.engine.device import choose_device, choose_dtype, use_threads

    settings = build({"engine.device": device, "model.dtype": dtype})
    place = choose_device(settings)
    use_threads(settings, place)
    kind = choose_dtype(settings, config, place)
    try:
        return HeadAnalysis(files, config, place, kind, say).run(token_ids, threshold, heads)
    except torch.OutOfMemoryError:
        raise OutOfDeviceMemory(
            f"{files.name} and a text of {len(token_ids)} tokens do not fit on {place}: try fewer "
            "--tokens, or --device cpu"
        ) from None


def _report(name: str, found: "Found", threshold: float, out: Path | None) -> dict[str, Any]:
    from memd.analysis.clusters import cluster

    config, chosen = found.config, found.chosen
    element_bytes = found.element_bytes
    answer: dict[str, Any] = {
        "model": name,
        "layers": config.num_layers,
        "kv_heads": config.num_kv_heads,
        "query_heads": config.num_heads,
        "kv_bytes_per_token": config.kv_bytes_per_token(element_bytes),
        "compared_tokens": found.compared_tokens,
        "measured_tokens": found.measured_tokens,
        "threshold": threshold,
        "perplexity": found.perplexity,
        "options": [_option(config, option, element_bytes) for option in found.options],
        "by_layer": [
            {"layer": layer, "alike": cluster(each, threshold=threshold), "similarity": each}
            for layer, each in enumerate(found.similarities)
        ],
        "chosen": None,
        "plan": None if out is None else str(out),
    }
    if chosen is not None and found.shared_perplexity is not None:
        answer["chosen"] = {
            **_option(config, chosen, element_bytes),
            "perplexity": found.shared_perplexity,
            "perplexity_rise_ratio": found.shared_perplexity / found.perplexity - 1,
            "clusters": chosen.clusters,
        }
    return answer


def _option(config: "ModelConfig", option: "Option", element_bytes: int) -> dict[str, Any]:
    before = config.kv_bytes_per_token(element_bytes)
    after = before * option.kv_heads // config.num_kv_heads
    added_heads = option.query_heads - config.num_heads
    added = 2 * config.num_layers * added_heads * config.head_dim * config.hidden_size
    return {
        "kv_heads": option.kv_heads,
        "query_heads": option.query_heads,
        "kv_bytes_per_token": after,
        "kv_saved_ratio": 1 - after / before,
        "added_weight_bytes": added * element_bytes,
        "least_similarity": option.least_similarity,
        "mean_similarity": option.mean_similarity,
    }


def _print(report: dict[str, Any]) -> None:
    nested = ("options", "by_layer", "chosen", "plan")
    print_fields({key: value for key, value in report.items() if key not in nested})
    if report["options"]:
        say("")
        columns = tuple(report["options"][0])
        rows = ([show(value, key) for key, value in row.items()] for row in report["options"])
        print_table([name.removesuffix("_bytes").replace("_", " ") for name in columns], rows)
    say("")
    alike = [
        (row["layer"], " ".join("+".join(map(str, each)) for each in row["alike"] if len(each) > 1))
        for row in report["by_layer"]
    ]
    print_table(
        ("layer", f"alike to {report['threshold']:g}"), ((a, b or "none") for a, b in alike)
    )
    say("")
    if report["chosen"] is None:
        say("No number of KV heads below the model's is alike enough in every layer.")
        return
    print_fields({"shared": {k: v for k, v in report["chosen"].items() if k != "clusters"}})
