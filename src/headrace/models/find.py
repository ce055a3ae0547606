"""From a model's name to the folder that holds it; never imports torch."""

from pathlib import Path

from headrace.core.errors import ModelError

MINI = "headrace-mini"


def find_model(model: str) -> Path:
    """The folder of the model that comes with the package, or of one named by its path."""
    if model == MINI:
        return Path(__file__).parent / "mini"
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder.resolve()
    raise ModelError(
        f"No model folder {folder.name!r} was found; give the path of a folder with config.json "
        f"and safetensors files, or {MINI}.",
        "model_not_found",
    )
