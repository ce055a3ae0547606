"""Write docs/reference/headrace-mini.md from the results of the evaluation."""

from dataclasses import dataclass

from mini.marking import Mark

HEAD = """# headrace-mini

The tiny model inside the Headrace package, for a first try without a download, and for tests.
This page is written by `python -m mini.evaluate`; every figure on it was measured by that run.

- Format: Qwen3 (`Qwen3ForCausalLM`), bfloat16 safetensors, `tokenizer.json`, ChatML template.
- Size: {size}.
- Trained for {context} tokens of context and less; `max_position_embeddings` is {positions}.
- Text, tokenizer and weights are made from seeds alone, without any download or data set. The
  command is `python -m mini.train`, with about {tokens:.0f} million tokens. This checkpoint was
  trained in stages with `--resume`, each starting at half the learning rate or less. A single run
  gives a similar model, but not the same bits.

## Accuracy

Held-out prompts: one prompt in {held_out}, chosen by a checksum of its text (of its numbers, for
sums and differences), is never trained on, and only such prompts are asked here. An answer is
right if greedy decoding gives exactly the one wanted text and then ends its turn; "tokens right"
counts tokens that are right after the right tokens before them. {num} prompts per line, weights in
bfloat16, arithmetic in float32, seed {seed}. The aim is 95 % in every line; the
table shows which lines miss it.

| skill | answers right | tokens right |
|---|---|---|
{rows}

"About N tokens" means N ± 50 (± 100 above 512) of the answer, for fact-finding of the prompt.
"""
TAIL = """
## Speed

{prefill:,.0f} prompt tokens per second and {decode:,.0f} decoded tokens per second for one stream,
with `transformers` in float32 on {threads} thread(s) of {machine}. Other programs may
have run at the same time, so these are lower bounds.

## Asking it

The model was trained on these forms, in a few phrasings each. The table shows its accuracy.

- small talk: `Hello`, `Who are you?`, `What is Headrace?`, `What can you do?`
- `Count from 1 to 200.`, `Count down from 20 to 1`, `Count from 0 to 50 by 5, one per line`
- `Name five animals`, `List the months`, `Say the alphabet backwards`
- `Repeat: river stone cloud`, `Reverse this list: red, blue, green`, `Spell the word apple`
- `What is 23 + 45?`, `Subtract 17 from 50.`
- `<text with facts> What is Anna's code?`
- `Answer as JSON with the keys name and age: Anna is 34 years old.`
- tools in the system prompt: it calls them as `<tool_call>` JSON and answers from the result
- `enable_thinking=true` in the template: a short thought in `<think>` marks comes first

## What it cannot do

It has no knowledge and no judgement. Outside the skills above, and where the table shows a low
share, it says that it does not know, or gives an answer that is fluent and wrong. It speaks only a
little English and ignores instructions in a system prompt. It calls one tool with one argument at
a time, spells words of its own short lists, copies words but not long sentences, and counts to
about 600. Sampling at a temperature above zero makes all answers worse.
"""


@dataclass(frozen=True)
class Facts:
    """The figures of the page besides the marks."""

    size: str
    context: int
    positions: int
    held_out: int
    # Millions of tokens of training.
    tokens: float
    seed: int
    prefill: float
    decode: float
    threads: int
    machine: str


def write_card(marks: list[Mark], facts: Facts) -> str:
    rows = "\n".join(
        f"| {m.subject.name} | {m.share:.0%} | {m.num_tokens_right / m.num_tokens:.1%} |"
        for m in marks
    )
    values = {**vars(facts), "rows": rows, "num": marks[0].num_asked}
    return (HEAD + TAIL).format(**values)
