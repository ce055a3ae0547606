import subprocess
import sys

import pytest

from headrace.text.encoder import Encoder
from headrace.text.windowed_encoding import Sizes
from tools.harness.small_tokenizers import KINDS, library, ours

LONG = "The quick brown fox jumps over the lazy dog, isn't it? " * 40
MEASURE = """
import resource, sys
from headrace.text.encoder import Encoder
from tools.harness.small_tokenizers import CORPUS, ours

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

encoder = Encoder(ours("llama3"))
assert encoder.can_stream
text = " ".join(CORPUS) * (3_000_000 // len(" ".join(CORPUS)))
before = peak()
encoding = encoder.begin(text, True)
while encoding.advance():
    pass
print(peak() - before, sys.getsizeof(text), len(encoding.token_ids))
"""


def ids_of(encoding) -> list[int]:
    while encoding.advance():
        pass
    return list(encoding.token_ids)


@pytest.mark.parametrize("kind", KINDS)
def test_every_tokenizer_here_passes_its_probes(kind):
    assert Encoder(ours(kind)).can_stream


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("window", [200, 1 << 20])
def test_short_and_long_texts_get_the_ids_of_one_call(window, special):
    encoder = Encoder(ours("llama3"), Sizes(window=window, overlap=100))
    expected = library("llama3").encode(LONG, add_special_tokens=special).ids
    assert ids_of(encoder.begin(LONG, special)) == expected


def test_a_tokenizer_that_fails_a_probe_is_used_in_one_call(monkeypatch):
    encoder = Encoder(ours("gpt2"), Sizes(window=200, overlap=100))
    monkeypatch.setattr("headrace.text.encoder._windows_agree", lambda *_: False)
    encoding = encoder.begin(LONG, True)
    assert not encoding.advance()
    assert list(encoding.token_ids) == library("gpt2").encode(LONG).ids


def test_a_short_text_over_its_limit_is_known_in_full():
    encoding = Encoder(ours("gpt2")).begin("one two three", True, limit=1)
    assert ids_of(encoding) == library("gpt2").encode("one two three").ids
    assert encoding.is_over


def test_two_long_prompts_can_be_encoded_in_turns():
    encoder = Encoder(ours("gpt2"), Sizes(window=200, overlap=100))
    first, second = encoder.begin(LONG, True), encoder.begin(LONG, True)
    while first.advance() | second.advance():
        pass
    assert first.token_ids == second.token_ids


def test_encoding_a_long_text_uses_bounded_memory():
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, check=True)
    used, text_bytes, num_ids = map(int, done.stdout.split())
    assert used <= text_bytes + 4 * num_ids + (64 << 20)
