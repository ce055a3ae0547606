from headrace.bench.profile import PROFILES, plan_of


def test_prompts_are_shortened_until_they_fit_the_model() -> None:
    assert plan_of(PROFILES["wall"], 8192).prompt_tokens == 2048
    assert plan_of(PROFILES["wall"], 512).prompt_tokens == 511
