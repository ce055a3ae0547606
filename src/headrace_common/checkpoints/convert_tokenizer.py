"""Makes a tokenizer.json from older files.

`python -m headrace_common.checkpoints.convert_tokenizer FOLDER OUT` runs in a process of its own,
because transformers imports torch, which the gateway never does. It reads local files only, never
runs code that comes with a model, and its memory is limited.
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
    """Convert with a limit on the memory of this process."""
    resource.setrlimit(resource.RLIMIT_DATA, (max_bytes, max_bytes))
    main(folder, out)


if __name__ == "__main__":
    run(Path(sys.argv[1]), Path(sys.argv[2]))
