"""`headrace merge`: a model and an adapter as one model."""

from pathlib import Path

import click


@click.command("merge")
@click.argument("model", metavar="BASE")
@click.argument("adapter", metavar="ADAPTER", type=click.Path(exists=True, path_type=Path))
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
def merge(model: str, adapter: Path, out: Path) -> None:
    """Add an adapter (LoRA) to the weights of its base, and write that as a model of its own.

    BASE is a folder with safetensors files, or the id of such a model; ADAPTER a folder of PEFT's
    or a GGUF file; OUT a new folder. Unmerged, one base serves many adapters: `headrace serve BASE
    --adapter NAME=ADAPTER`.

    \b
    headrace merge Qwen/Qwen3-0.6B ./sql-lora ./qwen3-sql
    headrace serve ./qwen3-sql
    """
    from headrace_common.checkpoints.find import find_model
    from headrace_common.checkpoints.spec import read_spec
    from headrace_engine.weights.merge import merge as write

    num = write(read_spec(find_model(model, None)), adapter, out)
    click.echo(f"{out}: {num} matrices of {model} are changed.", err=True)
