"""Receives the spans of traces, and checks each of them."""

from headrace.metrics.traces import RequestSpan


class SimTraces:
    """Checks spans instead of sending them."""

    is_on = True

    def ended(self, span: RequestSpan) -> None:
        """Check that the times, the tokens and the end of a span agree."""
        attributes = span.attributes
        times = [span.moments[name] for name in _TIMES if name in span.moments]
        # After a kill, the prompt of the first choice may be read after another choice's token.
        has_one = "gen_ai.request.choice.count" not in attributes
        assert times == sorted(times) or not has_one, f"{span.name}: {span.moments}"
        assert all(0 <= it <= span.seconds + 0.01 for it in times), f"{span}"
        if "gen_ai.usage.output_tokens" not in attributes:
            return
        has_end = "gen_ai.response.finish_reasons" in attributes
        assert has_end or span.error, f"{span.name} ended without a reason"
        most = attributes["gen_ai.request.max_tokens"]
        most *= attributes.get("gen_ai.request.choice.count", 1)  # type: ignore[operator]
        assert attributes["gen_ai.usage.output_tokens"] <= most, f"{span}"  # type: ignore[operator]

    def close(self) -> None:
        pass


_TIMES = ("headrace.prompt_began", "headrace.prompt_read", "headrace.first_token")
