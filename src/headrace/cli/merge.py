"""`headrace merge`: combines a model and an adapter into one model."""

from pathlib import Path

import click


@click.command("merge", short_help="Merge a LoRA adapter into its base model.")
@click.argument("model", metavar="BASE")
@click.argument("adapter", metavar="ADAPTER", type=click.Path(exists=True, path_type=Path))
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
def merge(model: str, adapter: Path, out: Path) -> None:
    """Merge a LoRA adapter into the weights of its base model, and write a new model.

    BASE is a folder with safetensors files, or the hub id of such a model. ADAPTER is a PEFT folder
    or a GGUF file. OUT is a new folder. To serve many adapters on one base instead, use `headrace
    serve BASE --adapter NAME=ADAPTER`.

    \b
    headrace merge Qwen/Qwen3-0.6B ./sql-lora ./qwen3-sql
    headrace serve ./qwen3-sql
    """
    from headrace_common.checkpoints.find import find_model
    from headrace_common.checkpoints.spec import read_spec
    from headrace_engine.weights.merge import merge as write

    num = write(read_spec(find_model(model, None)), adapter, out)
    click.echo(f"{out}: {num} matrices of {model} were changed.", err=True)
