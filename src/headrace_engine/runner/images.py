"""Decodes images within limits, and converts them to tensors with a model's processor.

The module runs in a separate worker process at the lowest priority. The tensors are written to a
file in memory that the gateway and the engine can both open.
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
from headrace_common.plan import EncoderInput, PromptInputs
from headrace_common.system.panics import STEERING
from headrace_engine.runner.lanes.foreign import Signature
from headrace_engine.runner.lanes.image_tensors import ImageTensors

MAX_PIXELS = 40_000_000
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_NO_PIXELS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "num_crops")
_GRID_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
_FOR_VIDEOS = ("video_preprocessor_config.json", "processor_config.json")
# If a processor returns this tensor, attention within an image is bidirectional.
_BIDIRECTIONAL = "token_type_ids"


class Prepared(NamedTuple):
    """A prompt with images: the token ids, including placeholders, and the prepared images."""

    token_ids: "array[int]"
    inputs: PromptInputs


def open_image(data: bytes, param: str) -> Image.Image:
    """Decode the first frame to upright RGB; RequestError for an invalid or too large image.

    The size is checked before any pixel is decoded.
    """
    try:
        with warnings.catch_warnings():
            # The limit MAX_PIXELS, checked below, is stricter than the library's limit.
            warnings.simplefilter("ignore")
            image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        known = ", ".join(FORMATS)
        raise _invalid(
            f"This is not an image in a supported format; send one of {known}.", param
        ) from None
    # A decoder can raise any exception for the bytes that a client sends.
    except Exception as error:
        raise _invalid("This image cannot be read; it may be damaged.", param) from error
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise RequestError(
            "image_too_large",
            f"The image has {width} × {height} pixels; the limit is {MAX_PIXELS} pixels. Send a "
            "smaller image.",
            param,
        )
    if not width * height:
        raise _invalid("The image has no pixels; send another image.", param)
    try:
        image.load()
        return ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:
        raise _invalid("The image is truncated or damaged; send it again.", param) from error


def _invalid(message: str, param: str) -> RequestError:
    return RequestError("invalid_image", message, param)


class _GridProcessor:
    """The image part of Qwen-VL's processor. The full processor needs torchvision for videos."""

    def __init__(self, folder: Path, config: Any) -> None:
        self._images = AutoImageProcessor.from_pretrained(folder, local_files_only=True)
        self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self._image_id = config.image_token_id
        self.image_token = str(self._tokenizer.convert_ids_to_tokens(config.image_token_id))

    def __repr__(self) -> str:
        return repr(self._images)

    def __call__(self, text: list[str], images: list[Image.Image]) -> dict[str, Tensor]:
        processed = dict(self._images(images=images, return_tensors="pt"))
        head, *rest = text[0].split(self.image_token)
        cells = (processed["image_grid_thw"].prod(-1) // self._images.merge_size**2).tolist()
        parts = [self.image_token * num + after for num, after in zip(cells, rest, strict=True)]
        ids = self._tokenizer("".join([head, *parts]), add_special_tokens=False).input_ids
        processed["input_ids"] = torch.tensor([ids])
        processed["mm_token_type_ids"] = processed["input_ids"].eq(self._image_id).int()
        return processed


def _load_processor(folder: Path, config: Any) -> Any:
    is_grid = config.model_type in _GRID_TYPES
    # The full processor also needs a configuration for videos, which GGUF files do not have.
    has_videos = importlib.util.find_spec("torchvision") is not None and any(
        (folder / name).is_file() for name in _FOR_VIDEOS
    )
    if is_grid and not has_videos:
        return _GridProcessor(folder, config)
    return AutoProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


class ImageProcessor:
    """Prepares images with the model's processor; ModelError if the processor cannot be used.

    `in_pieces` says whether the lane runs the image encoder block by block.
    """

    def __init__(self, folder: Path, in_pieces: bool = False) -> None:
        try:
            check_texts(folder)
            self._config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            self._processor: Any = _load_processor(folder, self._config)
        except (MemoryError, *STEERING):
            raise
        # A library that reads the folder's files may panic, and a panic is not an Exception.
        except BaseException as error:
            raise ModelError(
                f"The image processor of {folder.name} cannot be loaded; see the server's log."
            ) from error
        self._signature = Signature.of(type(self._processor).__call__)
        self._num_units = self._config.vision_config.depth + 1 if in_pieces else 1
        self._settings = repr(self._processor).encode()
        self.placeholder: str = getattr(self._processor, "image_token", "")

    def prepare(
        self, text: str, images: Sequence[bytes], params: Sequence[str], path: str
    ) -> Prepared:
        """Prepare a prompt, and append the tensors of the images to the file at `path`.

        `text` has one placeholder per image.
        """
        processed = self._process(text, images, params)
        ids = array("i", processed["input_ids"].reshape(-1).tolist())
        is_image = [token_id in self._placeholder_ids for token_id in ids]
        ranges = self._placeholder_ranges(is_image, processed, len(images))
        tensors = {
            k: v for k, v in processed.items() if k not in _NO_PIXELS and isinstance(v, Tensor)
        }
        parts = _split(tensors, len(images))
        if len(ranges) != len(parts):
            ranges, parts = [(ranges[0][0], ranges[-1][1])], [tensors]
        positions = self._positions(processed)
        works = []
        with Path(path).open("r+b") as file:
            file.seek(0, io.SEEK_END)
            at = _write(file, "positions", positions) if positions is not None else None
            for number, ((start, end), part) in enumerate(zip(ranges, parts, strict=True)):
                written = tuple(_write(file, name, tensor) for name, tensor in part.items())
                num_rows = sum(is_image[start:end])
                image = ImageTensors(path, num_rows, written, at if number == 0 else None)
                sources = images[number : number + 1] if len(parts) == len(images) else images
                works.append(self._work(start, end, image, sources))
        spans = tuple(ranges) if _BIDIRECTIONAL in processed else ()
        return Prepared(ids, PromptInputs(tuple(works), spans))

    def num_tokens(self, text: str, image: bytes, param: str) -> int:
        """Return the number of tokens of a prompt with one image."""
        return int(self._process(text, [image], [param])["input_ids"].numel())

    def _work(
        self, start: int, end: int, image: ImageTensors, sent: Sequence[bytes]
    ) -> EncoderInput:
        mark = blake2b(self._settings, digest_size=16)
        for data in sent:
            mark.update(blake2b(data).digest())
        data = msgspec.msgpack.encode(image)
        num, is_whole = self._num_units, self._num_units == 1
        return EncoderInput(start, end, end - start, num, is_whole, data=data, mark=mark.digest())

    def _process(self, text: str, images: Sequence[bytes], params: Sequence[str]) -> dict[str, Any]:
        opened = [open_image(data, param) for data, param in zip(images, params, strict=True)]
        offered = {
            "text": [text],
            "images": opened,
            "add_special_tokens": False,
            "return_tensors": "pt",
        }
        try:
            processed = self._processor(**self._signature.accepted(offered))
            return {key: processed[key] for key in processed}
        except (MemoryError, *STEERING):
            raise
        # A panic in a library is a BaseException, not an Exception.
        except BaseException as error:
            raise _invalid(
                "The model's image processor failed on this image; send another image.", params[0]
            ) from error

    @cached_property
    def _placeholder_ids(self) -> frozenset[int]:
        names = ("image_token_id", "image_token_index")
        return frozenset(i for n in names if (i := getattr(self._config, n, None)) is not None)

    def _placeholder_ranges(
        self, is_image: list[bool], processed: dict[str, Any], num_images: int
    ) -> list[tuple[int, int]]:
        """Return each image's range of placeholders; one range if images cannot be separated."""
        at = [index for index, is_set in enumerate(is_image) if is_set]
        if not at:
            raise RequestError(
                "template_failed",
                "The model's chat template omits the images of this request.",
                "messages",
            )
        groups = [
            [i for i, _ in group]
            for is_set, group in groupby(enumerate(is_image), lambda x: x[1])
            if is_set
        ]
        if len(groups) == num_images:
            return [(group[0], group[-1] + 1) for group in groups]
        counts = [len(at) // num_images] * num_images
        if (grid := processed.get("image_grid_thw")) is not None:
            cells = grid.prod(-1).tolist()
            counts = [len(at) * cell // sum(cells) for cell in cells]
        if sum(counts) != len(at):
            return [(at[0], at[-1] + 1)]
        ranges, first = [], 0
        for count in counts:
            ranges.append((at[first], at[first + count - 1] + 1))
            first += count
        return ranges

    @cached_property
    def _model(self) -> Any:
        """Return the model without weights, for computing positions."""
        with torch.device("meta"):
            return AutoModelForImageTextToText.from_config(self._config)

    def _positions(self, processed: dict[str, Any]) -> Tensor | None:
        """Return the positions of the whole prompt, [3, 1, tokens].

        Returns None if the positions of the model do not have three axes.
        """
        if "image_grid_thw" not in processed:
            return None
        count = self._model.model.get_rope_index
        names = ("input_ids", "mm_token_type_ids", "image_grid_thw")
        offered = {name: processed[name] for name in names if name in processed}
        positions: Tensor = count(**Signature.of(count).accepted(offered))[0]
        return positions


def _split(tensors: dict[str, Tensor], num_images: int) -> list[dict[str, Tensor]]:
    """Return the tensors of each image, or a single entry if the images cannot be separated."""
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
