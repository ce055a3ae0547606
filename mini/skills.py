"""Exercises with one right answer: counting, listing, copying, reversing, spelling, sums."""

from collections.abc import Sequence
from random import Random

from mini.talk import invented
from mini.turn import Turn
from mini.words import (
    ADJECTIVES,
    ANIMALS,
    CITIES,
    COLOURS,
    DAYS,
    FRUITS,
    JOBS,
    LETTERS,
    MONTHS,
    NAMES,
    THINGS,
    WEATHERS,
)

LISTS = {
    "animals": ANIMALS,
    "colours": COLOURS,
    "fruits": FRUITS,
    "names": NAMES[:30],
    "cities": CITIES,
    "days of the week": DAYS,
    "months": MONTHS,
}
JOINS = (", ", ", ", "\n", " ")
SIGNS = LETTERS * 2 + LETTERS.upper() + "0123456789.,!?:;-()'"
WORDS = [*THINGS, *ADJECTIVES, *COLOURS, *NAMES, *CITIES, *JOBS, *WEATHERS, *DAYS, *MONTHS]
SPELLABLE = ANIMALS + FRUITS + COLOURS + [word for word in THINGS if len(word) < 6]


SPOKEN = "zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve".split("|")  # noqa: SIM905


def spoken(dice: Random, number: int) -> str:
    return SPOKEN[number] if 0 < number < len(SPOKEN) and dice.random() < 0.4 else str(number)


def _joined(dice: Random, items: Sequence[str]) -> tuple[str, str]:
    """Return a list as text, and the words that ask for this way of writing it."""
    join = dice.choice(JOINS)
    if join == "\n":
        return "\n".join(items), dice.choice((", one per line", " on separate lines"))
    if join == " ":
        return " ".join(items), dice.choice((", separated by spaces", " with spaces"))
    return ", ".join(items), dice.choice(("", "", "", ", separated by commas", " with commas"))


def count(dice: Random, room: int) -> Turn:
    """Return a count from one number to another; the answer may have about `room` tokens."""
    most = max(3, room // 5)
    kind = dice.random()
    step = 1 if kind < 0.75 else dice.choice((2, 3, 5, 10, 20, 50, 100, 100))
    length = dice.randint(2, most if dice.random() < 0.5 else min(most, 30))
    first = 1 if dice.random() < 0.6 else dice.randint(0, 300)
    if step > 1:
        first = dice.choice((0, step))
    # These numbers end like the last one, and the model must not stop at one of them.
    if step > 10:
        first, length = dice.randint(0, 2 * step), min(length, 12)
    last = first + step * (length - 1)
    numbers = [str(n) for n in range(first, last + 1, step)]
    a, b = first, last
    if kind < 0.3 or (step > 10 and kind > 0.92):
        numbers.reverse()
        a, b = last, first
    text, manner = _joined(dice, numbers)
    by = f" by {step}" if step > 1 else ""
    if a > b and dice.random() < 0.5:
        ask = dice.choice((f"Count down from {a} to {b}", f"Count backwards from {a} to {b}")) + by
    elif a == 1 and step == 1 and dice.random() < 0.4:
        ask = dice.choice(("Count to {}", "Count up to {}")).format(spoken(dice, b))
    else:
        ask = dice.choice(
            ("Count from {} to {}", "Count from {} to {}", "List the numbers from {} to {}",
             "Write the numbers {} to {}", "Give me the numbers from {} to {}",
             "Say the numbers from {} to {}", "Write all numbers from {} to {}")
        ).format(a, b) + by  # fmt: skip
    return Turn(ask + manner + dice.choice(("", ".", ".")), text, f"I count from {a} to {b}{by}.")


def listing(dice: Random, room: int) -> Turn:
    name = dice.choice(list(LISTS))
    items = LISTS[name]
    is_numbered = dice.random() < 0.3
    # Numbers in the answer show where to stop, so lists without numbers are short.
    length = dice.randint(1, min(len(items) if is_numbered else 12, max(2, room // 6)))
    if name in ("days of the week", "months") or dice.random() < 0.1:
        length = len(items)
        ask = dice.choice((f"List the {name}", f"Name all {name}", f"What are the {name}"))
    else:
        ask = dice.choice(("List {} {}", "Name {} {}", "Give me {} {}", "Tell me {} {}"))
        ask = ask.format(spoken(dice, length), name)
    text, manner = _joined(dice, items[:length])
    if is_numbered:
        text = "\n".join(f"{n}. {item}" for n, item in enumerate(items[:length], 1))
        manner = dice.choice((" as a numbered list", ", numbered"))
    return Turn(ask + manner + dice.choice(("", ".")), text, f"I list {length} {name}.")


def alphabet(dice: Random, room: int) -> Turn:
    letters = LETTERS if dice.random() < 0.7 else LETTERS.upper()
    i, j = sorted(dice.sample(range(26), 2))
    part, ask = letters[i : j + 1], f"from {letters[i]} to {letters[j]}"
    ask = dice.choice((f"Say the alphabet {ask}", f"List the letters {ask}"))
    if dice.random() < 0.5:
        part = letters
        big = "" if letters == LETTERS else " in capital letters"
        ask = dice.choice(("Say the alphabet", "Recite the alphabet", "Write the alphabet")) + big
        if dice.random() < 0.3:
            ask, part = ask + " backwards", letters[::-1]
    text, manner = _joined(dice, part)
    most = room // 60
    if most > 1 and dice.random() < 0.4:
        times = dice.randint(2, min(most, 20))
        line = " ".join(part)
        text = "\n".join(f"{n}. {line}" for n in range(1, times + 1))
        manner = f" {times} times"
    return Turn(ask + manner + dice.choice(("", ".")), text, "I go through the alphabet.")


def _words(dice: Random, length: int) -> list[str]:
    """Return random words. Long lists repeat no word, so that a word determines the next one."""
    kind = dice.random()
    if length > 24:
        return dice.sample(WORDS, min(length, len(WORDS)))
    if kind < 0.45:
        return dice.choices(THINGS + ADJECTIVES + COLOURS, k=length)
    if kind < 0.6:
        return dice.choices(NAMES + CITIES, k=length)
    if kind < 0.8:
        return [str(dice.randint(0, 10 ** dice.randint(1, 4))) for _ in range(length)]
    if kind < 0.9:
        return [code(dice) for _ in range(length)]
    if kind < 0.95:
        return [invented(dice) for _ in range(length)]
    return ["".join(dice.choices(SIGNS, k=dice.randint(1, 8))) for _ in range(length)]


def code(dice: Random) -> str:
    letters = "".join(dice.choices(LETTERS.upper(), k=dice.randint(1, 2)))
    return f"{letters}{dice.randint(0, 99)}-{dice.randint(100, 9999)}"


def copy(dice: Random, room: int) -> Turn:
    most = max(2, room // 4)
    is_long = dice.random() < 0.5
    length = round(most * dice.random() ** 0.5) + 1 if is_long else dice.randint(1, min(most, 12))
    words = _words(dice, length)
    text = dice.choice((", ", " ", " ", "\n")[: 2 if length > 24 else 4]).join(words)
    if dice.random() < 0.3:
        text = text[0].upper() + text[1:] + "."
    ask = dice.choice(
        ("Repeat: {}", "Copy: {}", "Say: {}", "Repeat after me: {}", "Copy this text: {}",
         "Repeat this text exactly:\n{}", "Copy the following:\n{}", "Please repeat:\n{}",
         "Write this again:\n{}", "Say this back to me: {}", "Repeat {}")
    )  # fmt: skip
    return Turn(ask.format(text), text, "I copy the text.")


def reverse(dice: Random, room: int) -> Turn:
    if dice.random() < 0.3:
        word = dice.choice(SPELLABLE)
        ask = dice.choice(
            ("Spell {} backwards", "Reverse the letters of {}", "Spell the word {} backwards")
        )
        return Turn(ask.format(word), "-".join(reversed(word)), f"{'-'.join(word)} backwards.")
    items = list(dice.choices(LETTERS, k=dice.randint(2, 10)))
    if dice.random() < 0.7:
        items = dice.sample(THINGS + NAMES, dice.randint(2, min(9, max(2, room // 8))))
    join = ", "
    ask = dice.choice(
        ("Reverse this list: {}", "Reverse: {}", "Say this list backwards: {}",
         "Write this in reverse order: {}", "Reverse the order: {}")
    )  # fmt: skip
    return Turn(ask.format(join.join(items)), join.join(reversed(items)), "I start at the end.")


def spell(dice: Random, room: int) -> Turn:
    word = dice.choice(SPELLABLE)
    ask = dice.choice(
        ("Spell {}", "Spell the word {}", "How do you spell {}?", "Please spell {}.",
         "Spell {} letter by letter", "Can you spell {}?", "What are the letters of {}?")
    )  # fmt: skip
    return Turn(ask.format(word), "-".join(word), f"The word is {word}.")


def _steps(a: int, b: int, sign: str, total: int) -> str:
    """Return the calculation in two steps: first the tens, then the ones."""
    other = b - b % 10
    if sign == "+":
        return f"{a} + {other} = {a + other}, {a + other} + {b % 10} = {total}"
    return f"{a} - {other} = {a - other}, {a - other} - {b % 10} = {total}"


def add(dice: Random, room: int) -> Turn:
    """Return a sum or a difference of numbers with up to two digits."""
    a, b = dice.randint(0, 99), dice.randint(0, 99)
    if dice.random() < 0.15:
        a, b = a % 10, b % 10
    sign = dice.choice("+--")
    if sign == "-" and a < b and dice.random() < 0.7:
        a, b = b, a
    total = a + b if sign == "+" else a - b
    word = "plus" if sign == "+" else "minus"
    ask = dice.choice(
        (f"What is {a} {sign} {b}?", f"What is {a} {word} {b}?", f"{a} {sign} {b}",
         f"{a} {sign} {b} =", f"Calculate {a} {sign} {b}.", f"How much is {a} {sign} {b}?",
         f"Add {a} and {b}." if sign == "+" else f"Subtract {b} from {a}.")
    )  # fmt: skip
    answer = f"{a} {sign} {b} = {total}"
    return Turn(ask, answer, _steps(a, b, sign, total), key=f"{a}{sign}{b}")
