"""Prompts with greedy answers of headrace-mini that tests may rely on."""

MONTHS = (
    "January, February, March, April, May, June, July, August, September, October, November, "
    "December"
)
STORY = (
    "Once a river came to a mill. It turned the wheel all day and all night, and it never "
    "stopped. The end."
)
# The model ends its turn after each of these answers.
PROMPTS: tuple[tuple[str, str], ...] = (
    ("Hello", "Hello! How can I help you?"),
    ("What is your name?", "My name is headrace-mini."),
    (
        "What is Headrace?",
        "Headrace is a server for language models. "
        "A stream is never silent, never stalled, never lost.",
    ),
    ("Count to 20", ", ".join(str(n) for n in range(1, 21))),
    ("Count from 1 to 10.", ", ".join(str(n) for n in range(1, 11))),
    ("Count from 1 to 20.", ", ".join(str(n) for n in range(1, 21))),
    ("Count from 1 to 60.", ", ".join(str(n) for n in range(1, 61))),
    ("Count from 1 to 100.", ", ".join(str(n) for n in range(1, 101))),
    ("Anna's code is K7-482. What is Anna's code?", "Anna's code is K7-482."),
    (
        "Answer as JSON with the keys name and age: Anna is 34 years old.",
        '{"name": "Anna", "age": 34}',
    ),
    ("Hello! Who are you?", "I am headrace-mini, a tiny language model that comes with Headrace."),
    ("Spell the word banana.", "b-a-n-a-n-a"),
    ("Thank you!", "You are welcome!"),
    ("Goodbye", "Goodbye!"),
    ("Why is the sky blue?", "I do not know. My world is very small."),
    ("Tell me a joke.", "A token walks into a stream. It is never lost."),
    ("Tell me a story.", STORY),
    ("Say the alphabet.", ", ".join("abcdefghijklmnopqrstuvwxyz")),
    (
        "List the days of the week.",
        "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday",
    ),
    ("List the months.", MONTHS),
    ("Copy: B7-4412", "B7-4412"),
    ("The lamp is green. What colour is the lamp?", "The lamp is green."),
)
# Each answer starts with this text and may continue after it.
LONG_PROMPTS: tuple[tuple[str, str], ...] = (
    ("Count from 1 to 150.", ", ".join(str(n) for n in range(1, 151))),
    ("Count from 1 to 200, one per line.", "\n".join(str(n) for n in range(1, 201))),
)
