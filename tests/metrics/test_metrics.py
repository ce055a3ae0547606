import time

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.engines.client import EngineDown
from headrace.metrics.metrics import LiveFigures, Metrics
from headrace.streams.events import AnyEvent
from headrace.streams.usage import UsageCounter
from headrace_common.errors import OVERRAN, RequestError
from headrace_common.messages import Status, StepTrace
from tests.gateway.builders import READY, ended, log_of, make_record, make_request, tokens


def figures(metrics: Metrics, *streams: LiveFigures, vllm: str = "") -> dict[str, float]:
    families = text_string_to_metric_families(metrics.text("ok", streams, vllm).decode())
    found = {}
    for family in families:
        for sample in family.samples:
            found["|".join([sample.name, *(sample.labels[k] for k in sorted(sample.labels))])] = (
                sample.value
            )
    return found


def status(num_preemptions: int = 0, **missed: int) -> Status:
    steps = (StepTrace(4, 0, 0.1, 0.1, 0.2, None, ""),)
    return Status(3, 2, 70, 5, 0, 9, missed=missed, steps=steps, num_preemptions=num_preemptions)


def told(metrics: Metrics, *events: AnyEvent) -> UsageCounter:
    """Count the events of a stream in `metrics` and return its usage counter."""
    tally = UsageCounter()
    for event in log_of(make_record(make_request()), *events):
        tally.feed(event, metrics.requests)
    return tally


def test_a_request_is_counted_once_with_its_usage() -> None:
    metrics = Metrics()
    tally = told(metrics, tokens("Hi", 5, 6, at_ms=250), ended())
    metrics.requests.ended("/v1/chat/completions", "finished", tally, 1.5)
    found = figures(metrics)
    assert found["headrace_requests_total|finished|/v1/chat/completions"] == 1
    assert found["headrace_prompt_tokens_total"] == tally.usage.prompt_tokens == 2
    assert found["headrace_generated_tokens_total"] == tally.usage.completion_tokens == 2
    assert found["headrace_ttft_seconds_sum"] == 0.25
    assert found["headrace_request_seconds_sum"] == 1.5


def test_a_request_without_tokens_has_no_time_to_first_token() -> None:
    metrics = Metrics()
    metrics.requests.ended("/v1/completions", "cancelled", UsageCounter(), 0.5)
    assert figures(metrics)["headrace_ttft_seconds_count"] == 0


def test_prefix_hits_on_disk_are_summed_across_engines() -> None:
    metrics = Metrics()
    for tokens_now, late in ((200, 1), (50, 2)):
        disk = {"runs": 1, "tokens": tokens_now, "written_bytes": 9}
        figures_now = msgspec.structs.replace(status(1), disk=disk, disk_misses={"late": late})
        metrics.engine.show_status(figures_now, READY)
        metrics.engine.is_down(EngineDown("engine_failed", "", False))
    found = figures(metrics)
    assert found["headrace_disk_prefix_hits_total"] == 2
    assert found["headrace_disk_prefix_tokens_total"] == 250
    assert found["headrace_disk_prefix_read_bytes_total"] == 0
    assert found["headrace_disk_prefix_written_bytes_total"] == 18
    assert found["headrace_disk_prefix_misses_total|late"] == 3


def test_counters_continue_after_an_engine_restarts() -> None:
    metrics = Metrics()
    metrics.engine.is_up(READY)
    metrics.engine.show_status(status(2, decode=4), READY)
    metrics.engine.is_down(EngineDown("engine_failed", "", False, from_outside=True))
    metrics.engine.is_up(READY)
    metrics.engine.show_status(status(1, decode=1, tail=2), READY)
    found = figures(metrics)
    assert found["headrace_stall_target_missed_total|decode"] == 5
    assert found["headrace_stall_target_missed_total|tail"] == 2
    assert found["headrace_preemptions_total"] == 3
    assert found["headrace_engine_starts_total"] == 2
    assert found["headrace_engine_restarts_total|killed"] == 1
    assert found["headrace_running"] == 3 and found["headrace_blocks|free"] == 5
    assert found["headrace_step_seconds_count|decode"] == 2
    assert found["headrace_state|ok"] == 1 and found["headrace_state|dead"] == 0


def test_the_age_of_the_last_step_is_reported_once_there_was_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    metrics, clock = Metrics(), [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    assert "headrace_last_step_age_seconds" not in figures(metrics)
    metrics.engine.show_status(status(), READY)
    clock[0] += 3
    metrics.engine.show_status(status(), READY)  # no step since
    assert figures(metrics)["headrace_last_step_age_seconds"] == 3


def test_gaps_and_first_tokens_are_counted_while_the_stream_runs() -> None:
    metrics = Metrics()
    told(metrics, *(tokens("a", 5, at_ms=at) for at in (200, 260, 1260)))
    found = figures(metrics)
    assert found["headrace_ttft_seconds_sum"] == 0.2
    assert found["headrace_inter_token_seconds_count"] == 2
    assert abs(found["headrace_inter_token_seconds_sum"] - 1.06) < 1e-9
    assert found["headrace_inter_token_seconds_bucket|0.1"] == 1


def test_gaps_are_measured_within_each_choice() -> None:
    metrics = Metrics()
    told(metrics, *(tokens("a", 5, at_ms=100 * n, choice=n % 2) for n in range(4)))
    found = figures(metrics)
    assert found["headrace_ttft_seconds_count"] == 1
    assert found["headrace_inter_token_seconds_count"] == 2
    assert abs(found["headrace_inter_token_seconds_sum"] - 0.4) < 1e-9


def test_streams_are_counted_by_state_and_with_their_readers() -> None:
    found = figures(Metrics(), ("queued", 2, 7.5), ("decode", 2, 0.5))
    assert found["headrace_silent_stream_age_seconds"] == 7.5
    assert (found["headrace_streams|queued"], found["headrace_streams|prompt"]) == (1, 0)
    assert found["headrace_readers"] == 4


def test_refusals_are_counted_by_reason_and_template_overruns_separately() -> None:
    metrics = Metrics()
    for message in (f"{OVERRAN}: it took more than 5 seconds.", "Roles must alternate."):
        metrics.server.refused(RequestError("template_failed", message))
    found = figures(metrics)
    assert found["headrace_rejections_total|template_failed"] == 2
    assert found["headrace_template_overruns_total"] == 1


def test_the_heartbeat_age_ignores_ended_streams() -> None:
    metrics = Metrics()
    assert figures(metrics)["headrace_heartbeat_age_seconds"] == 0
    metrics.server.frame_sent("a stream")
    assert 0 < figures(metrics)["headrace_heartbeat_age_seconds"] < 60
    metrics.server.frames_ended("a stream")
    assert figures(metrics)["headrace_heartbeat_age_seconds"] == 0


def test_figures_are_also_available_under_vllms_names() -> None:
    metrics = Metrics()
    metrics.engine.is_up(READY)
    metrics.engine.show_status(status(2), READY)
    tally = told(metrics, tokens("Hi", 5, 6, at_ms=250), ended("length"))
    metrics.requests.ended("/v1/chat/completions", "finished", tally, 1.5)
    assert not any(name.startswith("vllm") for name in figures(metrics))
    found = figures(metrics, vllm="mini")
    assert found["vllm:num_requests_running|0|mini"] == 3
    assert found["vllm:num_preemptions_total|0|mini"] == 2
    assert found["vllm:generation_tokens_total|0|mini"] == 2
    assert found["vllm:prefix_cache_queries_total|0|mini"] == 2
    assert found["vllm:request_success_total|0|length|mini"] == 1
    assert found["vllm:time_to_first_token_seconds_bucket|0|0.35|mini"] == 1
    assert found["vllm:e2e_request_latency_seconds_sum|0|mini"] == 1.5
    assert found["vllm:kv_cache_usage_perc|0|mini"] == 0


def test_a_page_of_several_models_lists_each_metric_family_once() -> None:
    server, models = Metrics(), {"a": Metrics(), "b": Metrics()}
    for number, metrics in enumerate(models.values(), 1):
        metrics.engine.is_up(READY)
        metrics.engine.show_status(status(number, decode=number), READY)
    server.server.refused(RequestError("server_overloaded", ""))
    lines = server.text("ok", (), models=models).decode().splitlines()
    assert 'headrace_rejections_total{reason="server_overloaded"} 1.0' in lines
    assert 'headrace_preemptions_total{model="b"} 2.0' in lines
    assert 'headrace_stall_target_missed_total{cause="decode",model="a"} 1.0' in lines
    helps = [line for line in lines if line.startswith("# HELP")]
    assert len(helps) == len(set(helps)) == len(Metrics().text("ok", ()).split(b"# HELP")) - 1
