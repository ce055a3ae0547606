"""`python -m headrace.checkpoints.convert_tokenizer FOLDER OUT`: a tokenizer.json from older files.

A process of its own: transformers imports torch, which the gateway never does. It reads local
files only and never runs code that comes with a model.
"""

import sys
from pathlib import Path


def main(folder: Path, out: Path) -> None:
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    loaded.backend_tokenizer.save(str(out))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
