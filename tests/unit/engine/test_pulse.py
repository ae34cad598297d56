"""The sign of life from within a long step."""

from memd.engine.messages import Working
from memd.engine.port import PULSE_SECONDS, InlinePort, Pulse


def test_it_beats_now_and_then_however_often_it_is_asked() -> None:
    port, now = InlinePort(), [100.0]
    pulse = Pulse(port, lambda: now[0])
    for _ in range(50):
        pulse.beat()
    assert port.take() == []
    for _ in range(2):
        now[0] += PULSE_SECONDS
        for _ in range(50):
            pulse.beat()
    assert port.take() == [Working(), Working()]
