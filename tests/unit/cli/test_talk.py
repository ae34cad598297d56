"""`memd generate` and `memd chat` over scripted streams."""

import pytest

MODELS = (200, {"object": "list", "data": [{"id": "tiny", "object": "model"}]})
USAGE = {
    "prompt_tokens": 12,
    "completion_tokens": 3,
    "total_tokens": 15,
    "prompt_tokens_details": {"cached_tokens": 8},
}


def completion(*texts):
    chunks = [{"choices": [{"index": 0, "text": text}], "usage": None} for text in texts]
    return [*chunks, {"choices": [], "usage": USAGE}, "[DONE]"]


def answer(*texts):
    deltas = [{"role": "assistant", "content": ""}, *({"content": text} for text in texts), {}]
    chunks = [{"choices": [{"index": 0, "delta": delta}], "usage": None} for delta in deltas]
    return [*chunks, {"choices": [], "usage": USAGE}, "[DONE]"]


@pytest.fixture
def talker(daemon, memd):
    daemon.answers["GET /v1/models"] = MODELS
    daemon.answers["POST /v1/completions"] = (200, completion("one ", "zwei ", "три\u2028"))
    daemon.answers["POST /v1/chat/completions"] = (200, answer("Hi ", "there"))
    return memd


def test_generate(daemon, talker):
    result = talker("generate", "Count:", "--max-tokens", "3", "--temperature", "0", "--stop", "x")
    assert result.stdout == "one zwei три\u2028\n"
    assert result.stderr.startswith("[3 tokens")
    assert result.stderr.endswith("; 8 of 12 prompt tokens cached]\n")
    assert daemon.body_of("POST /v1/completions") == {
        "model": "tiny",
        "prompt": "Count:",
        "max_tokens": 3,
        "temperature": 0.0,
        "stop": ["x"],
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_generate_reads_stdin(daemon, talker):
    assert talker("generate", "-", input="from a pipe").exit_code == 0
    assert daemon.body_of("POST /v1/completions")["prompt"] == "from a pipe"


def test_generate_as_json_is_the_whole_answer(daemon, talker):
    daemon.answers["POST /v1/completions"] = (200, {"id": "cmpl-1", "choices": []})
    assert talker("generate", "x", "--format", "json").stdout == (
        '{\n  "id": "cmpl-1",\n  "choices": []\n}\n'
    )
    assert daemon.body_of("POST /v1/completions")["stream"] is False


def test_an_error_inside_the_stream(daemon, talker):
    fault = {"error": {"message": "cancelled by the operator", "code": "cancelled"}}
    daemon.answers["POST /v1/completions"] = (200, [*completion("one ")[:1], fault, "[DONE]"])
    result = talker("generate", "x")
    assert (result.exit_code, result.stdout) == (1, "one \n")
    assert result.stderr == "memd: cancelled by the operator\n"


def test_a_stream_that_breaks_off(daemon, talker):
    daemon.answers["POST /v1/completions"] = (200, completion("one ")[:1])
    result = talker("generate", "x")
    assert result.exit_code == 3
    assert "before [DONE]" in result.stderr


def test_chat_keeps_and_resets_its_history(daemon, talker):
    lines = "Hello\n\nAgain\n/reset\nAnew\n/quit\nnever said\n"
    result = talker("chat", "--system", "Be brief.", input=lines)
    assert result.exit_code == 0
    assert result.stdout == "Hi there\n" * 3
    asked = [body["messages"] for route, body in daemon.asked if route.startswith("POST")]
    opening = {"role": "system", "content": "Be brief."}
    assert [[m["content"] for m in messages] for messages in asked] == [
        ["Be brief.", "Hello"],
        ["Be brief.", "Hello", "Hi there", "Again"],
        ["Be brief.", "Anew"],
    ]
    assert asked[0][0] == opening


def test_chat_in_a_pipe_ends_at_the_first_error(daemon, talker):
    daemon.answers["POST /v1/chat/completions"] = (400, {"error": {"message": "too long"}})
    result = talker("chat", input="a\nb\n")
    assert result.exit_code == 4
    assert result.stderr == "memd: too long\n"
