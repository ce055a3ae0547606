"""Defines a LoRA adapter without its weights, which the runner owns."""

import msgspec


class Adapter(msgspec.Struct, frozen=True):
    """A LoRA adapter. Clients request an adapter by name, as they request a model.

    `fingerprint` identifies the contents of the adapter's files. Requests whose adapters have
    different fingerprints never share cached prefixes. An engine refuses an adapter if the files no
    longer match the fingerprint.
    """

    name: str
    path: str  # a PEFT folder or a GGUF file
    fingerprint: str
    parent: str = ""  # name of the base model
