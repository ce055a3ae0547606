"""Tests that jobs and their results are encoded and decoded without loss."""

from typing import get_args

import pytest

from headrace_common.errors import RequestError
from headrace_common.worker_jobs import (
    AnyJob,
    Encoded,
    EncodePairs,
    EncodePrompts,
    FitImages,
    Job,
    ListInput,
    PutImages,
    ReadNames,
    Refusal,
    SeeImages,
    Tokenize,
    decode_job,
    decode_result,
    encode_job,
    encode_result,
)


def test_the_union_has_every_job_and_each_declares_its_result_type() -> None:
    direct = Job.__subclasses__()
    assert set(get_args(AnyJob)) == {
        *direct,
        *(sub for job in direct for sub in job.__subclasses__()),
    }
    assert all(get_args(job.__orig_bases__[0]) for job in direct)


@pytest.mark.parametrize(
    "job", [EncodePrompts(7), PutImages((3, 0)), ListInput("resp_1", 20, True, ""), Tokenize({})]
)
def test_a_decoded_job_equals_the_encoded_one(job: AnyJob) -> None:
    assert decode_job(encode_job(job)) == job


def test_a_result_is_decoded_to_the_type_that_its_job_declares() -> None:
    encoded = Encoded((b"\1\0\0\0",), nums_first=(1,))
    assert decode_result(EncodePairs(7, "tiny"), encode_result(encoded)) == encoded
    assert decode_result(ReadNames(), encode_result(("a", "b"))) == ("a", "b")


def test_bytes_are_not_packed_again() -> None:
    written = b'{"content":""}'
    assert encode_result(written) is written
    assert decode_result(Tokenize({}), written) is written


def test_only_image_jobs_go_to_the_image_worker() -> None:
    assert [job for job in get_args(AnyJob) if job.is_for_images] == [FitImages, SeeImages]


def test_a_refusal_keeps_its_code_message_and_param_across_processes() -> None:
    error = RequestError("image_too_large", "Too large.", "input[0]", {"n": 3}).noting(limit=2)
    again = Refusal.of(error).error()
    assert (again.code, again.message, again.param) == (error.code, error.message, error.param)
    assert (again.extra, again.noted) == ({"n": 3}, {"limit": 2})
