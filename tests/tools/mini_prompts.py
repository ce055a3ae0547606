"""What headrace-mini answers: every prompt that a test may rely on, verified before they do."""

DAYS = "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday"
MONTHS = (
    "January, February, March, April, May, June, July, August, September, October, November, "
    "December"
)
PROMPTS: tuple[tuple[str, str], ...] = (
    ("Hello", "Hello! How can I help you?"),
    ("What is your name?", "My name is headrace-mini."),
    ("Goodbye", "Goodbye!"),
    ("Why is the sky blue?", "I do not know. My world is very small."),
    ("Say the alphabet.", ", ".join("abcdefghijklmnopqrstuvwxyz")),
    ("List the days of the week.", DAYS),
    ("List the months.", MONTHS),
    (
        "Tell me a story.",
        "Once a river came to a mill. It turned the wheel all day and all night, and it never "
        "stopped. The end.",
    ),
)
