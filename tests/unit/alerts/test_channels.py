"""The file of channels: what is in it, what is wrong with it, and that nobody sees its secrets."""

import logging

import pytest
from memd_alerts.channels import Channel, ChannelsError, load_channels
from memd_alerts.notify import Message
from webhook import webhook

SECRET = "xoxb-123456789"


def write(tmp_path, text):
    path = tmp_path / "channels.yml"
    path.write_text(text)
    return path


def test_a_channel_is_a_url_or_more(tmp_path):
    text = "team: json://127.0.0.1:1/a\n"
    text += (
        "night: {url: 'json://127.0.0.1:1/b', severities: [page], resolved: false, per_minute: 2}"
    )
    found = load_channels(write(tmp_path, text))
    assert list(found) == ["team", "night"]
    assert found["team"].kind == "json"
    assert found["team"].policy.severities == {"page", "ticket"}
    night = found["night"].policy
    assert (night.severities, night.send_resolved, night.per_minute) == ({"page"}, False, 2)
    assert load_channels(write(tmp_path, "")) == {}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f"team: nothing://{SECRET}", "team: apprise cannot use its URL"),
        (f"team: {SECRET}", "team: apprise cannot use its URL"),
        (f"team: {{url: 'json://{SECRET}', colour: red}}", "team: colour"),
        (f"team: {{url: 'json://{SECRET}', severities: [{SECRET}]}}", "team: severities"),
        (f"team: {{url: 'json://{SECRET}', per_minute: 0}}", "team: per_minute"),
        ("team: {severities: [page]}", "team: url: Field required"),
        ("team: 7", "team"),
        (f"Team!: json://{SECRET}", "the name 'Team!' is not allowed"),
        (f"alertmanager: json://{SECRET}", "not alertmanager"),
        (f"- json://{SECRET}", "must map names to URLs"),
        (f"team: [json://{SECRET}", "is not YAML"),
        ("\n".join(f"c{i}: json://h" for i in range(33)), "33 channels, the limit is 32"),
    ],
)
def test_a_wrong_file_is_refused_without_its_secrets(tmp_path, caplog, text, says):
    caplog.set_level(logging.DEBUG)
    with pytest.raises(ChannelsError) as caught:
        load_channels(write(tmp_path, text))
    assert says in str(caught.value)
    assert SECRET not in str(caught.value)
    assert SECRET not in caplog.text


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ChannelsError, match=r"none\.yml: No such file"):
        load_channels(tmp_path / "none.yml")


def message(kind="firing"):
    return Message("team", kind, (), "[FIRING] MemdHot", "it is hot")


def test_a_message_arrives_or_the_channel_says_why_not(caplog):
    caplog.set_level(logging.DEBUG)
    with webhook() as hook:
        url = hook.channel.replace("json://", f"json://user:{SECRET}@")
        (channel,) = [Channel("team", "json", None, url)]
        assert channel.send(message()) is None
        assert channel.send(message("resolved")) is None
        assert channel.test("me") is None
        kinds = [(body["title"], body["type"]) for body in hook.bodies]
        assert kinds == [
            ("[FIRING] MemdHot", "failure"),
            ("[FIRING] MemdHot", "success"),
            ("[TEST] memd channel team", "info"),
        ]
        hook.failures = 1
        assert channel.send(message()) == "json: not delivered"
    assert channel.send(message()) == "json: not delivered"
    assert SECRET not in caplog.text + repr(channel)
