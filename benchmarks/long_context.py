"""Long texts at constant memory: a window with sinks, a plain window, and recomputation.

    python benchmarks/long_context.py perplexity [--tokens 16384] [--window 512] [--sinks 4]
    python benchmarks/long_context.py memory [--tokens 65536] [--model smollm2-135m]

Either takes `--device cuda`.

`perplexity` sends CPython's documentation through the engine in this process, as one prompt whose
tokens' log-probabilities are asked for, with and without sinks. For the baseline, a sliding window
with recomputation (StreamingLLM, arXiv 2309.17453), each stretch of `--stride` tokens (a quarter of
the window) is predicted anew from nothing but what stands before it in one window; so a token sees
from three quarters of a window to a whole one. All three are compared on the tokens behind the
second window.

`memory` generates a long text, with a tiny random model unless another is named, and reports pages
and resident memory on the way.
"""

import argparse
import math
import os
import resource
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from memd.config import dump
from memd.config_sources import load
from memd.engine.build import load_engine
from memd.engine.messages import SamplingParams, Start, StepReport, Submit
from memd.engine.port import InlinePort
from memd.models.hub import read_config, resolve
from memd.models.tokenizer import load_tokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
MODEL = "smollm2-135m"


class Inline:
    """An engine in this process that runs one request at a time."""

    def __init__(self, device: str, *settings: str) -> None:
        self._port = InlinePort()
        threads = torch.get_num_threads()
        assignments = [f"engine.device={device}", f"engine.threads={threads}", *settings]
        tree = load(assignments=assignments, environment={})
        self.engine, self.ready = load_engine(self._port, Start(dump(tree), 1, 2**20, []))
        self.most_pages = 0
        self._serial = 0

    def run(
        self, prompt: list[int], sampling: SamplingParams, every: int = 0
    ) -> list[float | None]:
        """Log-probabilities of the prompt's tokens; reports each `every` tokens."""
        self._serial += 1
        self._port.post(Submit(f"r{self._serial}", prompt, sampling))
        found: list[float | None] = []
        done, told = 0, 0
        while True:
            self.engine.step()
            pool = self.engine.pool
            self.most_pages = max(self.most_pages, pool.pages.active)
            for message in self._port.take():
                if not isinstance(message, StepReport):
                    continue
                for output in message.outputs:
                    if output.error:
                        raise SystemExit(output.error)
                    done += len(output.token_ids)
                    found += [each and each.logprob for each in output.prompt_logprobs or []]
                    if output.finish_reason is not None:
                        return found
            if every and done >= told + every:
                told = done
                print(
                    f"{done:>7} tokens  {pool.pages.active:>5} pages held, at most "
                    f"{self.most_pages}  {resident_bytes() / 2**20:6.0f} MiB resident",
                    flush=True,
                )


def resident_bytes() -> int:
    """Memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def text_tokens(count: int) -> list[int]:
    """The beginning of CPython's documentation, which every machine has."""
    from pydoc_data import topics

    files = resolve(MODEL)
    tokenizer = load_tokenizer(files, read_config(files))
    if tokenizer is None:
        raise SystemExit(f"{MODEL} has no tokenizer")
    tokens = tokenizer.encode("\n\n".join(topics.topics[name] for name in sorted(topics.topics)))
    if len(tokens) < count:
        raise SystemExit(f"the text has {len(tokens)} tokens, {count} were asked for")
    return tokens[:count]


def windowed(
    tokens: list[int], window: int, sinks: int, device: str
) -> tuple[list[float | None], int, float]:
    """Log-probabilities of a text, most pages held, and seconds."""
    inline = Inline(
        device,
        f"model.path={MODEL}",
        f"model.max_len={len(tokens) + 1}",
        f"kv.window={window}",
        f"kv.sinks={sinks}",
        f"memory.limit={8 * window + 1024} tokens",
    )
    started = time.monotonic()
    logprobs = inline.run(tokens, SamplingParams(1, max_tokens=1, prompt_logprobs=0))
    return logprobs, inline.most_pages, time.monotonic() - started


def recomputed(tokens: list[int], window: int, stride: int, device: str) -> list[float]:
    """Log-probabilities of the tokens behind the second window, each from a window of its own."""
    inline = Inline(device, f"model.path={MODEL}", f"memory.limit={window + 1024} tokens")
    sampling = SamplingParams(1, max_tokens=0, prompt_logprobs=0)
    found: list[float] = []
    for start in range(2 * window, len(tokens), stride):
        stop = min(start + stride, len(tokens))
        logprobs = inline.run(tokens[max(0, stop - window) : stop], sampling)
        found += [each or 0.0 for each in logprobs[start - stop :]]
    return found


def perplexity(logprobs: list[float]) -> float:
    return math.exp(-sum(logprobs) / len(logprobs))


def compare(num_tokens: int, window: int, sinks: int, stride: int, device: str) -> None:
    """Print a table of perplexities."""
    tokens = text_tokens(num_tokens)
    print(f"{MODEL}, {num_tokens} tokens of pydoc_data.topics, window {window}, sinks {sinks}")
    for name, count in (("window with sinks", sinks), ("plain window", 0)):
        logprobs, pages, seconds = windowed(tokens, window, count, device)
        whole = perplexity([each for each in logprobs if each is not None])
        late = perplexity([each or 0.0 for each in logprobs[2 * window :]])
        print(
            f"{name:<24} all {whole:9.3f}  behind the second window {late:9.3f}  "
            f"{pages} pages held at most, {seconds:.0f} s",
            flush=True,
        )
    started = time.monotonic()
    late = perplexity(recomputed(tokens, window, stride, device))
    seconds = time.monotonic() - started
    print(f"{'recomputed window':<24} behind the second window {late:9.3f}  {seconds:.0f} s")


def hold(num_tokens: int, window: int, sinks: int, device: str, model: str | None) -> None:
    """Print what is held while a long text is generated."""
    with TemporaryDirectory() as directory:
        if model is None:
            import tiny

            model = str(tiny.write_model(Path(directory) / "tiny", num_layers=2))
        inline = Inline(
            device,
            f"model.path={model}",
            f"model.max_len={num_tokens + 64}",
            f"kv.window={window}",
            f"kv.sinks={sinks}",
            f"memory.limit={8 * window + 1024} tokens",
        )
        started = time.monotonic()
        sampling = SamplingParams(1, max_tokens=num_tokens, temperature=1.0, ignore_eos=True)
        inline.run(list(range(32)), sampling, every=num_tokens // 8)
        seconds = time.monotonic() - started
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        page_tokens = inline.engine.pool.layout.page_tokens
        print(
            f"{num_tokens} tokens in {seconds:.0f} s, at most {inline.most_pages} pages of "
            f"{page_tokens} tokens held, {peak_bytes / 2**20:.0f} MiB resident at the peak"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("perplexity", "memory"))
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--sinks", type=int, default=4)
    parser.add_argument("--stride", type=int)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", help="that generates; default: a tiny random one")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.what == "perplexity":
        stride = options.stride or options.window // 4
        compare(options.tokens or 16384, options.window, options.sinks, stride, options.device)
    else:
        tokens = options.tokens or 65536
        hold(tokens, options.window, options.sinks, options.device, options.model)


if __name__ == "__main__":
    main()
