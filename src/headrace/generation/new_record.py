"""The record that is stored of a request once it is admitted."""

import time

import msgspec

from headrace.core.ids import StreamId
from headrace.core.request import Request
from headrace.fleet.served_model import ServedModel
from headrace.generation.choice import begins_in_reasoning
from headrace.streams.record import RENDERING, Names, Record
from headrace.workers.image_file import Admitted


def new_record(
    stream_id: StreamId, model: ServedModel, request: Request, admitted: Admitted, names: Names
) -> Record:
    """Adds the model's end tokens, and a grammar that waits where the prompt opens reasoning."""
    sampling = msgspec.structs.replace(request.sampling, end_token_ids=model.spec.end_token_ids)
    record = Record(
        id=stream_id,
        created=int(time.time()),
        request=msgspec.structs.replace(request, sampling=sampling),
        prompts=admitted.prompts,
        images=admitted.images,
        system_fingerprint=model.system_fingerprint,
        names=names,
        served=model.setup,
        tokenization=admitted.tokenization,
        rendering=RENDERING,
    )
    if not (sampling.grammar_tags and begins_in_reasoning(record, 0, model.tokenizer)):
        return record
    sampling = msgspec.structs.replace(sampling, grammar_waits=True)
    return msgspec.structs.replace(
        record, request=msgspec.structs.replace(request, sampling=sampling)
    )
