from headrace.gateway.metrics_routes import about
from headrace.streams.store import SeenGateway
from headrace.streams.stores.memory import MemoryStore
from headrace_common.messages import Status, StepTrace
from tests.gateway.builders import READY, FakeGeneration
from tests.gateway.test_state_routes import client_of


class Shared(MemoryStore):
    """A fake store shared by two servers, one of them of an older version."""

    def __init__(self, generation: FakeGeneration) -> None:
        super().__init__()
        self.generation = generation

    async def gateways(self) -> list[SeenGateway]:
        told = about("here:8000", self.generation)  # type: ignore[arg-type]
        return [SeenGateway(2, told, True), SeenGateway(1, b"1", False)]


def busy() -> FakeGeneration:
    generation = FakeGeneration()
    history = generation.metrics.history
    history.clock = lambda: 100.0
    history.began = 50.0
    steps = (StepTrace(0, 300, 0, 0.1, 0.1, None, ""),)
    generation.metrics.engine.show_status(Status(1, 0, 0, 9, 0, 1, steps=steps), READY)
    generation.metrics.requests.planned(400, 100, 0.2)
    generation.metrics.requests.tokens(20, 0.05)
    history.clock = lambda: 101.0
    return generation


def test_live_figures_cover_all_models_and_each_one() -> None:
    found = client_of(busy()).get("/manage/live").json()
    assert found["live"]["tokens_in_per_s"] == 30 and found["live"]["tokens_out_per_s"] == 2
    assert found["live"]["cached_share"] == 0.25 and found["live"]["ttft_p50_ms"] is None
    (model,) = found["models"]
    assert model == {"model": model["model"], **found["live"]} and found["gateways"] == []


def test_the_last_hour_is_available_for_one_model_or_all() -> None:
    generation = busy()
    generation.metrics.history.clock = lambda: 3000.0
    client = client_of(generation)
    name = client.get("/v1/models").json()["data"][0]["id"]
    found = client.get("/manage/history").json()
    assert found["every_s"] == 10 and [it["ago_s"] for it in found["points"]] == [2900]
    assert found["points"][0]["tokens_in_per_s"] == 30
    assert client.get("/manage/history", params={"model": name}).json() == found
    assert client.get("/manage/history", params={"model": "another"}).status_code == 404


def test_gateways_of_one_store_are_listed_separately() -> None:
    generation = busy()
    generation.streams.store = Shared(generation)
    other, here = client_of(generation).get("/manage/live").json()["gateways"]
    assert (here["name"], here["is_this"], here["streams"]) == ("here:8000", True, 2)
    assert here["live"]["tokens_out_per_s"] == 2 and here["state"] == "ok"
    assert (other["name"], other["live"], other["streams"]) == ("unknown", None, 1)
