"""Converts older tokenizer files into a tokenizer.json.

`python -m headrace_common.checkpoints.convert_tokenizer FOLDER OUT` runs in a separate process,
because transformers imports torch and the gateway must not import torch. The process reads local
files only, never runs code from a model, and limits its own memory.
"""

import resource
import sys
from pathlib import Path

from headrace_common.checkpoints.small_file import check_texts

_MAX_BYTES = 2 << 30


def main(folder: Path, out: Path) -> None:
    from transformers import AutoTokenizer

    check_texts(folder)
    loaded = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    loaded.backend_tokenizer.save(str(out))


def run(folder: Path, out: Path, max_bytes: int = _MAX_BYTES) -> None:
    """Convert the tokenizer with a limit on the memory of this process."""
    resource.setrlimit(resource.RLIMIT_DATA, (max_bytes, max_bytes))
    main(folder, out)


if __name__ == "__main__":
    run(Path(sys.argv[1]), Path(sys.argv[2]))
