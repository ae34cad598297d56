"""Declarations: requests as their clients see them."""

from memd.histogram import DURATION, LATENCY, LENGTH, TOKEN_GAP
from memd.observe.catalog.common import MODEL
from memd.observe.family import Family

GENERATING = ("chat_completions", "completions")
ENDPOINTS = (*GENERATING, "models", "tokenize", "detokenize", "admin", "other")
OUTCOMES = ("ok", "invalid", "unauthorized", "overloaded", "timeout", "cancelled", "error")

REQUESTS = (
    Family(
        "memd_requests",
        "counter",
        "HTTP requests",
        {**MODEL, "endpoint": ENDPOINTS, "outcome": OUTCOMES},
    ),
    Family(
        "memd_request_duration_seconds",
        "histogram",
        "From the request's arrival to the last byte of its answer",
        {**MODEL, "endpoint": GENERATING},
        DURATION,
    ),
    Family(
        "memd_time_to_first_token_seconds",
        "histogram",
        "From the request's arrival to a sequence's first token",
        MODEL,
        LATENCY,
    ),
    Family(
        "memd_inter_token_latency_seconds",
        "histogram",
        "Gap between two outputs of a sequence",
        MODEL,
        TOKEN_GAP,
    ),
    Family(
        "memd_time_per_output_token_seconds",
        "histogram",
        "Mean gap between the tokens of a sequence",
        MODEL,
        TOKEN_GAP,
    ),
    Family("memd_request_prompt_tokens", "histogram", "Length of a prompt", MODEL, LENGTH),
    Family("memd_request_generated_tokens", "histogram", "Length of an output", MODEL, LENGTH),
)
