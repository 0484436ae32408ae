"""What the fields of a job may hold, as pydantic validators: each finds every fault of its field and says it plainly.

`contract` puts them into the models. They know nothing of msgpack's bytes and never repeat a text of the request.
"""

from __future__ import annotations

import binascii
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple, NoReturn

from pydantic import PlainValidator, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from producer.errors import MAX_NAMED_FAULTS, Code, shown
from producer.limits import MAX_IMAGE_BYTES, MAX_NAME_CHARACTERS
from producer.wire import Place, kind_of

# These mark the image's place in the prompt; a text that holds one would move it.
FORBIDDEN_TEXTS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
DATA_URL_PREFIXES: Mapping[str, str] = {
    f"data:{media_type};base64,": media_type for media_type in ("image/png", "image/jpeg")
}

# The type of the one pydantic error that carries a field's findings: a pydantic error for each would be slow.
FINDINGS = "findings"


class Finding(NamedTuple):
    """One fault of a field: `where` is the place below the field."""

    where: Place
    code: Code
    sentence: str


class ImageFile(NamedTuple):
    """An image file's bytes, not looked into, and the label of the data URL they came in (None for plain bytes)."""

    data: bytes
    media_type: str | None


def constant(what: str, allowed: str, advice: str) -> PlainValidator:
    """A field with one allowed string."""

    def findings(value: object) -> Iterator[Finding]:
        if value != allowed:
            found = shown(value) if isinstance(value, str) else kind_of(value)
            yield _invalid((), f'the {what} is {found}; only "{allowed}" is allowed: {advice}')

    return _plain(findings)


def text(what: str) -> PlainValidator:
    """A string, map, array or nil that becomes text of the prompt; inside maps and arrays all but binary may stand."""
    return _plain(lambda value: _text_findings(what, value, ()))


def options(most: int, advice: str) -> PlainValidator:
    """A map with 1 to `most` entries, whose keys are names and whose values are `text`."""

    def findings(value: object) -> Iterator[Finding]:
        if not isinstance(value, dict):
            yield _invalid((), not_a_map(value))
            return
        yield from _entry_findings("option", value, most, advice)
        for key, label in value.items():
            yield from _text_findings("label", label, (key,))

    return _plain(findings)


def entries(what: str, most: int, advice: str) -> WrapValidator:
    """A map with 1 to `most` entries whose keys are names; no more values are validated than faults are named."""

    def validate(value: object, handler: ValidatorFunctionWrapHandler) -> Any:
        if not isinstance(value, dict):
            _raise([_invalid((), not_a_map(value))])
        first = value if len(value) <= MAX_NAMED_FAULTS else dict(islice(value.items(), MAX_NAMED_FAULTS))
        return validated(first, handler, _entry_findings(what, value, most, advice))

    return WrapValidator(validate)


def image() -> PlainValidator:
    """An image file's bytes, plain or in a data URL; becomes an `ImageFile`."""

    def check(value: object) -> ImageFile:
        if isinstance(value, str):
            found = _image_of_data_url(value)
        elif isinstance(value, bytes | bytearray):
            found = ImageFile(bytes(value), None)
        else:
            sentence = f"the image is {kind_of(value)}; send the PNG or JPEG file's bytes as binary, or a data URL"
            _raise([_invalid((), sentence)])
        if len(found.data) > MAX_IMAGE_BYTES:
            sentence = (
                f"the image file has {len(found.data):,} bytes; at most {MAX_IMAGE_BYTES:,} (4 MiB) are allowed: "
                "scale it down or compress it more"
            )
            _raise([Finding((), Code.IMAGE_TOO_LARGE, sentence)])
        return found

    return PlainValidator(check)


def validated(value: object, handler: ValidatorFunctionWrapHandler, findings: Iterable[Finding]) -> Any:
    """Validate, and raise these findings together with what the validation finds, so that neither hides the other."""
    found = _first(findings)
    errors: list[InitErrorDetails] = [InitErrorDetails(type=_carrier(found), loc=(), input=None)] if found else []
    result = None
    try:
        result = handler(value)
    except ValidationError as error:
        errors += [_same_error(details) for details in error.errors(include_url=False)]
    if errors:
        raise ValidationError.from_exception_data("request", errors)
    return result


def not_a_map(value: object) -> str:
    """The sentence for anything that should have been a map."""
    return f"this is {kind_of(value)}; it must be a map"


def _plain(findings: Callable[[object], Iterable[Finding]]) -> PlainValidator:
    """The value itself, unless it has findings."""

    def check(value: object) -> object:
        if found := _first(findings(value)):
            _raise(found)
        return value

    return PlainValidator(check)


def _first(findings: Iterable[Finding]) -> list[Finding]:
    return list(islice(findings, MAX_NAMED_FAULTS + 1))  # one more says that there are more


def _raise(findings: list[Finding]) -> NoReturn:
    raise _carrier(findings)


def _carrier(findings: list[Finding]) -> PydanticCustomError:
    return PydanticCustomError(FINDINGS, findings[0].sentence, {FINDINGS: findings})


def _same_error(details: ErrorDetails) -> InitErrorDetails:
    context = details.get("ctx", {})
    kind = _carrier(context[FINDINGS]) if details["type"] == FINDINGS else details["type"]
    return InitErrorDetails(type=kind, loc=details["loc"], input=details["input"], ctx=context)


def _invalid(where: Place, sentence: str) -> Finding:
    return Finding(where, Code.INVALID_REQUEST, sentence)


def _text_findings(what: str, value: object, where: Place) -> Iterator[Finding]:
    if value is None or isinstance(value, str | dict | list | tuple):
        yield from _inner_findings(value, where)
    else:
        sentence = f"the {what} is {kind_of(value)}; a string, a map, an array or nil is allowed: send a string"
        yield _invalid(where, sentence)


def _inner_findings(value: object, where: Place) -> Iterator[Finding]:
    if isinstance(value, str):
        if held := _forbidden(value):
            yield _invalid(where, held)
    elif isinstance(value, bytes | bytearray):
        yield _invalid(where, "this is binary, which has no place in a prompt; send a string")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _inner_findings(item, (*where, index))
    elif isinstance(value, dict):
        for key, item in value.items():
            if isinstance(key, str) and (held := _forbidden(key)):
                yield _invalid((*where, key), f"in the key, {held}")
            yield from _inner_findings(item, (*where, key))


def _entry_findings(what: str, value: dict[object, object], most: int, advice: str) -> Iterator[Finding]:
    if not 1 <= len(value) <= most:
        yield _invalid((), f"there are {len(value):,} {what}s; 1 to {most} are allowed: {advice}")
    for name in value:
        if isinstance(name, str):  # any other key is the wire's fault
            yield from _name_findings(what, name)


def _name_findings(what: str, name: str) -> Iterator[Finding]:
    if not 1 <= len(name) <= MAX_NAME_CHARACTERS:
        sentence = f"the {what}'s name has {len(name):,} characters; 1 to {MAX_NAME_CHARACTERS} are allowed: rename it"
        yield _invalid((name,), sentence)
    if held := _forbidden(name):
        yield _invalid((name,), f"in the {what}'s name, {held}")


def _forbidden(text: str) -> str | None:
    held = [mark for mark in FORBIDDEN_TEXTS if mark in text]
    return f"the text holds {' and '.join(held)}, the image's marks in the prompt; remove that" if held else None


def _image_of_data_url(url: str) -> ImageFile:
    for prefix, media_type in DATA_URL_PREFIXES.items():
        if url.startswith(prefix):
            try:
                return ImageFile(binascii.a2b_base64(url[len(prefix) :], strict_mode=True), media_type)
            except ValueError:
                sentence = "the data URL's base64 is broken; encode the file with the standard alphabet and padding"
            _raise([Finding((), Code.DECODE_FAILED, sentence)])
    allowed = " or ".join(DATA_URL_PREFIXES)
    if not url.startswith("data:"):
        sentence = f"the image is a string but no data URL; send the file's bytes as binary, or {allowed} and base64"
        _raise([_invalid((), sentence)])
    beginning = shown(url[:100].partition(",")[0])
    sentence = f"the data URL begins with {beginning}; it must begin with {allowed}"
    _raise([Finding((), Code.UNSUPPORTED_FORMAT, sentence)])
