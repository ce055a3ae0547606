"""An adapter as all rooms name it; what it holds is the runner's."""

import msgspec


class Adapter(msgspec.Struct, frozen=True):
    """Low-rank additions (LoRA) to a model's layers, asked for as a model by its name.

    `fingerprint` stands for exactly these files: prefixes are kept apart by it, and an engine that
    finds others at the path refuses them.
    """

    name: str
    path: str  # of a folder of PEFT's, or of a GGUF file
    fingerprint: str
    parent: str = ""  # the name of its model
