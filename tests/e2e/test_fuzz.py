"""Two thousand requests nobody should send; `python tests/support/fuzz.py` sends more."""

from collections.abc import Iterator
from pathlib import Path

import fuzz
import pytest
from served import Daemon, serving
from tiny import write_model

pytestmark = pytest.mark.slow

BEYOND = 10**30  # what MessagePack cannot carry


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    model: Path = write_model(tmp_path_factory.mktemp("model") / "tiny", max_position=256)
    with serving(tmp_path_factory.mktemp("state"), str(model), *fuzz.LIMITS) as served:
        yield served
        assert served.metric("memd_log_messages_total", level="error") == 0
        served.assert_idle()


def test_numbers_beyond_64_bits_are_refused(daemon: Daemon) -> None:
    reclaim = daemon.post("/admin/v1/pool/reclaim", {"pages": BEYOND})
    assert reclaim.status_code == 400
    assert reclaim.json()["error"]["param"] == "pages"
    blocks = daemon.http.get("/admin/v1/pool/blocks", params={"offset": BEYOND})
    assert blocks.status_code == 400
    assert blocks.json()["error"]["param"] == "offset"
    for key in ("engine.reserve_tokens", "memory.regret_window", "engine.max_batch_tokens"):
        changes = {key: BEYOND}
        body = {"revision": 1, "reason": "test", "changes": changes}
        assert daemon.http.patch("/admin/v1/settings", json=body).status_code == 400
        preview = daemon.post("/admin/v1/settings/preview", {"changes": changes}).json()
        assert preview["problems"] == {key: "the number does not fit into 64 bits"}


def test_no_request_breaks_the_daemon(daemon: Daemon) -> None:
    """No 500, no silence, no page held at the end, nothing in the log as an error."""
    outcomes, faults = fuzz.run(daemon, seed=1, indices=range(2000))
    assert not faults, "\n".join(faults[:20])
    assert outcomes[200] > 200
    assert outcomes[400] > 500
    assert daemon.metric("memd_state", state="ready") == 1
