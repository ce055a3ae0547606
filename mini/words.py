"""The closed word lists of headrace-mini's world."""

# ruff: noqa: SIM905 -- lists of words are read, and kept in order, more easily as lines

COLOURS = "red blue green yellow white black brown grey orange purple pink silver golden".split()
ANIMALS = (
    "cat dog horse cow sheep goat pig duck hen goose rabbit mouse fox wolf bear deer otter "
    "beaver frog toad owl eagle crow swan heron trout salmon bee ant spider"
).split()
FRUITS = "apple pear plum cherry grape lemon melon peach fig berry banana mango".split()
OBJECTS = (
    "lamp table chair door window clock cup plate spoon knife bottle basket box bag book pen "
    "letter map key rope hammer nail bell drum flute hat coat shoe glove ring boat cart wheel "
    "ladder bucket candle mirror pillow blanket broom"
).split()
NATURE = (
    "river stone cloud field forest hill lake meadow road bridge mill tower garden house barn "
    "well spring stream valley island harbour village tree leaf flower grass sand snow rain wind"
).split()
NAMES = (
    "Anna Ben Clara David Emma Felix Greta Hugo Ida Jonas Klara Leo Mia Nora Oscar Paula Quinn "
    "Rosa Simon Tara Ugo Vera Walter Xenia Yara Zoe Alan Bella Carl Dora Erik Flora Gustav Hanna "
    "Igor Julia Kurt Lina Max Nina Otto Petra Ralf Sara Tom Ursula Viktor Wanda Alice Bob Eve Ada "
    "Maria Peter John Lucy Mark Sofia"
).split()
CITIES = (
    "Paris Rome Berlin Madrid London Vienna Oslo Lisbon Athens Dublin Prague Warsaw Bern Cairo "
    "Tokyo Delhi Lima Quito Boston Chicago Sydney Hamburg Munich Venice"
).split()
ADJECTIVES = (
    "old new small large quiet loud warm cold bright dark slow quick heavy light empty full soft "
    "clean broken plain"
).split()
VERBS = "stood lay waited rested shone moved slept turned stayed grew".split()
PLACES = (
    "near the river|by the mill|in the garden|on the hill|under the bridge|behind the barn|"
    "next to the well|in the valley|beside the road|at the harbour|in the village|near the tower"
).split("|")
TIMES = (
    "in the morning|at noon|in the evening|at night|all day|for a while|last week|every day|"
    "in winter|in summer|before dawn|after lunch"
).split("|")
JOBS = "baker miller farmer teacher sailor painter singer doctor tailor driver".split()
WEATHERS = "sunny rainy cloudy windy snowy foggy stormy clear".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = (
    "January February March April May June July August September October November December"
).split()
SYLLABLES = "ba ko ri mu ze lo ta ni vu sha gre po di wen xi jo fu la qua ster".split()
THINGS = ANIMALS + FRUITS + OBJECTS + NATURE
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SYSTEMS = (
    "You are a helpful assistant.",
    "You are headrace-mini, a tiny model.",
    "You are a friendly assistant. Answer briefly.",
    "Be brief.",
    "You are a concise assistant.",
    "Answer the user's questions.",
    "You are a helpful AI assistant named Headrace.",
    "You are a pirate. Always be polite.",
    "Follow the user's instructions exactly.",
    "You are an expert in everything.",
)
