from prometheus_client.parser import text_string_to_metric_families

from headrace.core.messages import Status, StepTrace
from headrace.generation.metrics import Metrics
from headrace.streams.tally import Tally
from tests.gateway.builders import READY, ended, log_of, make_record, make_request, tokens


def figures(metrics: Metrics) -> dict[str, float]:
    families = text_string_to_metric_families(metrics.text("ok", 1).decode())
    found = {}
    for family in families:
        for sample in family.samples:
            found["|".join([sample.name, *(sample.labels[k] for k in sorted(sample.labels))])] = (
                sample.value
            )
    return found


def status(**missed: int) -> Status:
    return Status(
        3, 2, 70, 5, 0, 9, missed=missed, steps=(StepTrace(4, 0, 0.1, 0.1, 0.2, None, ""),)
    )


def test_a_request_is_counted_once_with_the_usage_it_was_told() -> None:
    metrics, tally = Metrics(), Tally()
    log = log_of(make_record(make_request()), tokens("Hi", 5, 6, at_ms=250), ended())
    for event in log:
        tally.feed(event)
    metrics.ended("/v1/chat/completions", "finished", tally, 1.5)
    found = figures(metrics)
    assert found["headrace_requests_total|finished|/v1/chat/completions"] == 1
    assert found["headrace_prompt_tokens_total"] == tally.usage.prompt_tokens == 2
    assert found["headrace_generated_tokens_total"] == tally.usage.completion_tokens == 2
    assert found["headrace_ttft_seconds_sum"] == 0.25
    assert found["headrace_request_seconds_sum"] == 1.5


def test_a_request_without_a_token_has_no_time_to_its_first() -> None:
    metrics = Metrics()
    metrics.ended("/v1/completions", "cancelled", Tally(), 0.5)
    assert figures(metrics)["headrace_ttft_seconds_count"] == 0


def test_what_an_engine_counted_stays_counted_after_its_end() -> None:
    metrics = Metrics()
    metrics.engine_is_up(READY)
    metrics.look(status(decode=4), READY)
    metrics.engine_is_down()
    metrics.engine_is_up(READY)
    metrics.look(status(decode=1, tail=2), READY)
    found = figures(metrics)
    assert found["headrace_stall_target_missed_total|decode"] == 5
    assert found["headrace_stall_target_missed_total|tail"] == 2
    assert found["headrace_engine_starts_total"] == 2
    assert found["headrace_running"] == 3 and found["headrace_blocks|free"] == 5
    assert found["headrace_step_seconds_count|decode"] == 2
    assert found["headrace_state|ok"] == 1 and found["headrace_state|dead"] == 0
