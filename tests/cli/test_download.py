"""Health reports the progress of a download."""

from pathlib import Path

import httpx

from tests.checkpoints.small_hub import small_hub
from tools.harness.eventually import eventually
from tools.harness.processes import free_port
from tools.harness.servers import ServerProcess
from tools.harness.tiny_models import make_tiny_model


def test_health_says_how_far_a_download_is(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    repo = make_tiny_model(tmp_path / "model")

    def download() -> dict[str, int]:
        try:
            response = httpx.get(f"{url}/health")
        except httpx.TransportError:
            return {}
        assert response.status_code == 503 and response.headers["Retry-After"]
        body = response.json()
        assert body["status"] == "loading" and body["error"]["message"] == "Loading model"
        return dict(body.get("download", {}))

    with small_hub({"someone/model": repo}) as hub:
        hub.flows.clear()
        environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hub")}
        flags = ("someone/model", "--port", url.rpartition(":")[2], "--threads", "1")
        server = ServerProcess(*flags, environment=environment)
        try:
            eventually(lambda: download().get("bytes_done", 0) > 0, within_s=60)
            assert download()["bytes_done"] < download()["bytes_total"]
            assert httpx.get(f"{url}/health/live").json() == {"status": "ok"}
            refused = httpx.post(f"{url}/v1/chat/completions", json={})
            assert refused.status_code == 503 and refused.headers["Retry-After"]
            assert refused.json()["error"]["code"] == "model_loading"
            hub.flows.set()
            server.wait_until_ready()
            assert httpx.get(f"{url}/health").json()["status"] == "ok"
        finally:
            hub.flows.set()
            server.stop()
