"""Images on their way to a model: decoded within limits, and made into tensors by its processor.

Runs in a worker process of its own, at the lowest priority. The tensors go to a file in memory that
both the gateway's process and the engine's can open.
"""

import importlib.util
import io
import warnings
from array import array
from collections.abc import Sequence
from functools import cached_property
from hashlib import blake2b
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
)

from headrace_common.checkpoints.small_file import check_texts
from headrace_common.errors import ModelError, RequestError
from headrace_common.plan import EncodeWork, PromptInputs
from headrace_common.system.panics import STEERING
from headrace_engine.runner.lanes.foreign import Signature
from headrace_engine.runner.lanes.image_tensors import ImageTensors

MAX_PIXELS = 40_000_000
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_NO_PIXELS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "num_crops")
_GRID_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
_BOTH_WAYS = "token_type_ids"  # a processor that makes them has images that attend both ways


class Prepared(NamedTuple):
    """A prompt with images: its ids, the placeholders among them, and what they stand for."""

    token_ids: "array[int]"
    inputs: PromptInputs


def open_image(data: bytes, param: str) -> Image.Image:
    """RGB, upright, the first frame; RequestError, for too many pixels before any is decoded."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the limit below is stricter than the library's
            image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        known = ", ".join(FORMATS)
        raise _invalid(f"This is no image in one of these formats: {known}.", param) from None
    except Exception as error:  # a decoder runs on whatever a client sends
        raise _invalid("This image cannot be read.", param) from error
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise RequestError(
            "image_too_large",
            f"The image has {width} × {height} pixels, and {MAX_PIXELS} are taken; send a smaller "
            "one.",
            param,
        )
    if not width * height:
        raise _invalid("The image has no pixels.", param)
    try:
        image.load()
        return ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:
        raise _invalid("The image is truncated or damaged; send it again.", param) from error


def _invalid(message: str, param: str) -> RequestError:
    return RequestError("invalid_image", message, param)


class _GridProcessor:
    """The part of Qwen-VL's processor that sees images; its whole needs torchvision, for videos."""

    def __init__(self, folder: Path, config: Any) -> None:
        self._images = AutoImageProcessor.from_pretrained(folder, local_files_only=True)
        self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self._image_id = config.image_token_id
        self.image_token = str(self._tokenizer.convert_ids_to_tokens(config.image_token_id))

    def __repr__(self) -> str:
        return repr(self._images)

    def __call__(self, text: list[str], images: list[Image.Image]) -> dict[str, Tensor]:
        made = dict(self._images(images=images, return_tensors="pt"))
        head, *rest = text[0].split(self.image_token)
        cells = (made["image_grid_thw"].prod(-1) // self._images.merge_size**2).tolist()
        parts = [self.image_token * num + after for num, after in zip(cells, rest, strict=True)]
        ids = self._tokenizer("".join([head, *parts]), add_special_tokens=False).input_ids
        made["input_ids"] = torch.tensor([ids])
        made["mm_token_type_ids"] = made["input_ids"].eq(self._image_id).int()
        return made


def _load_processor(folder: Path, config: Any) -> Any:
    is_grid = config.model_type in _GRID_TYPES
    if is_grid and importlib.util.find_spec("torchvision") is None:
        return _GridProcessor(folder, config)
    return AutoProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


class ImageProcessor:
    """A model's own processor; ModelError if the folder has none that can be used.

    `in_pieces`: the lane sees an image block by block.
    """

    def __init__(self, folder: Path, in_pieces: bool = False) -> None:
        try:
            check_texts(folder)
            self._config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            self._processor: Any = _load_processor(folder, self._config)
        except (MemoryError, *STEERING):
            raise
        except BaseException as error:  # a library reads the folder's files, and may panic
            raise ModelError(
                f"The image processor of {folder.name} cannot be loaded; the server's log says why."
            ) from error
        self._signature = Signature.of(type(self._processor).__call__)
        self._num_units = self._config.vision_config.depth + 1 if in_pieces else 1
        self._settings = repr(self._processor).encode()
        self.placeholder: str = getattr(self._processor, "image_token", "")

    def prepare(
        self, text: str, images: Sequence[bytes], params: Sequence[str], path: str
    ) -> Prepared:
        """`text` has one placeholder for each image; their tensors are written to `path`."""
        opened = [open_image(data, param) for data, param in zip(images, params, strict=True)]
        try:
            made = self._process(text, opened)
        except (MemoryError, *STEERING):
            raise
        except BaseException as error:  # a library's panic is not an Exception
            raise _invalid("The model's processor cannot take this image.", params[0]) from error
        ids = array("i", made["input_ids"].reshape(-1).tolist())
        is_image = [token_id in self._placeholder_ids for token_id in ids]
        places = self._places(is_image, made, len(images))
        tensors = {k: v for k, v in made.items() if k not in _NO_PIXELS and isinstance(v, Tensor)}
        parts = _split(tensors, len(images))
        if len(places) != len(parts):
            places, parts = [(places[0][0], places[-1][1])], [tensors]
        positions = self._positions(made)
        works = []
        with Path(path).open("r+b") as file:
            file.seek(0, io.SEEK_END)
            at = _write(file, "positions", positions) if positions is not None else None
            for number, ((start, end), part) in enumerate(zip(places, parts, strict=True)):
                written = tuple(_write(file, name, tensor) for name, tensor in part.items())
                num_rows = sum(is_image[start:end])
                image = ImageTensors(path, num_rows, written, at if number == 0 else None)
                one = images[number : number + 1] if len(parts) == len(images) else images
                works.append(self._work(start, end, image, one))
        spans = tuple(places) if _BOTH_WAYS in made else ()
        return Prepared(ids, PromptInputs(tuple(works), spans))

    def _work(self, start: int, end: int, image: ImageTensors, sent: Sequence[bytes]) -> EncodeWork:
        mark = blake2b(self._settings, digest_size=16)
        for data in sent:
            mark.update(blake2b(data).digest())
        data = msgspec.msgpack.encode(image)
        num, is_whole = self._num_units, self._num_units == 1
        return EncodeWork(start, end, end - start, num, is_whole, data=data, mark=mark.digest())

    def _process(self, text: str, images: list[Image.Image]) -> dict[str, Any]:
        offered = {
            "text": [text],
            "images": images,
            "add_special_tokens": False,
            "return_tensors": "pt",
        }
        made = self._processor(**self._signature.accepted(offered))
        return {key: made[key] for key in made}

    @cached_property
    def _placeholder_ids(self) -> frozenset[int]:
        names = ("image_token_id", "image_token_index")
        return frozenset(i for n in names if (i := getattr(self._config, n, None)) is not None)

    def _places(
        self, is_image: list[bool], made: dict[str, Any], num_images: int
    ) -> list[tuple[int, int]]:
        """Where each image's placeholders begin and end; in one, if they cannot be told apart."""
        at = [index for index, here in enumerate(is_image) if here]
        if not at:
            raise RequestError("template_failed", "The chat template shows no image.", "messages")
        runs = [
            [i for i, _ in run]
            for here, run in groupby(enumerate(is_image), lambda x: x[1])
            if here
        ]
        if len(runs) == num_images:
            return [(run[0], run[-1] + 1) for run in runs]
        counts = [len(at) // num_images] * num_images
        if (grid := made.get("image_grid_thw")) is not None:
            cells = grid.prod(-1).tolist()
            counts = [len(at) * cell // sum(cells) for cell in cells]
        if sum(counts) != len(at):
            return [(at[0], at[-1] + 1)]
        places, first = [], 0
        for count in counts:
            places.append((at[first], at[first + count - 1] + 1))
            first += count
        return places

    @cached_property
    def _model(self) -> Any:
        """Without weights: it only counts positions."""
        with torch.device("meta"):
            return AutoModelForImageTextToText.from_config(self._config)

    def _positions(self, made: dict[str, Any]) -> Tensor | None:
        """[3, 1, tokens] of the whole prompt, where the model has rows and columns."""
        if "image_grid_thw" not in made:
            return None
        count = self._model.model.get_rope_index
        names = ("input_ids", "mm_token_type_ids", "image_grid_thw")
        offered = {name: made[name] for name in names if name in made}
        positions: Tensor = count(**Signature.of(count).accepted(offered))[0]
        return positions


def _split(tensors: dict[str, Tensor], num_images: int) -> list[dict[str, Tensor]]:
    """The tensors of each image; all in one where they cannot be told apart."""
    grid = tensors.get("image_grid_thw")
    if grid is not None:
        pieces = tensors["pixel_values"].split(grid.prod(-1).tolist())
        return [
            {"pixel_values": piece, "image_grid_thw": grid[i : i + 1]}
            for i, piece in enumerate(pieces)
        ]
    if all(len(tensor) == num_images for tensor in tensors.values()):
        return [{name: t[i : i + 1] for name, t in tensors.items()} for i in range(num_images)]
    return [tensors]


def _write(file: BinaryIO, name: str, tensor: Tensor) -> tuple[str, str, tuple[int, ...], int]:
    at = file.tell()
    file.write(tensor.contiguous().numpy().tobytes())
    return name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), at
