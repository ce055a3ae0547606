"""Messages about answers that Headrace did not write."""

from headrace.client.pacing import refusal


def test_an_answer_of_another_program_is_named_as_such_but_not_one_of_a_proxy() -> None:
    assert "status 501, is not from Headrace" in refusal(501, b"<html>").message
    assert refusal(502, b"<html>").message == "The server answered with status 502."
    assert refusal(404, b'{"error": {"message": "No.", "code": "x"}}').message == "No."
