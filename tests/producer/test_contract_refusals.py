"""Each way to break the contract has its own sentence and place, and a refusal names all of them."""

from __future__ import annotations

import base64
import json
import math

import msgpack
import pytest

from producer import limits
from producer.contract import CONTRACT_MODEL, parse_request
from producer.errors import MAX_NAMED_FAULTS, Code, RequestRefused
from tests.producer.jobs import IMAGE, SAVE, job, parsed, places, question, refused


def only_fault(value: object, code: Code = Code.INVALID_REQUEST) -> tuple[str, str]:
    refusal = refused(value)
    assert refusal.code == code
    [fault] = refusal.errors
    return fault.loc, fault.msg


@pytest.mark.parametrize("value", [None, 5, True, "text", b"bytes", []])
def test_a_job_is_a_map(value: object) -> None:
    loc, sentence = only_fault(value)
    assert loc == "payload"
    assert sentence.endswith("it must be a map")


@pytest.mark.parametrize(
    ("where", "keys"),
    [((), "model, state, questions"), (("state",), "image"), (("questions", "q"), "type, instructions, criteria")],
)
def test_every_map_has_exactly_its_keys(where: tuple[str, ...], keys: str) -> None:
    empty, surplus = job(questions={"q": dict(SAVE)}), job(questions={"q": dict(SAVE)}, state={"image": IMAGE})
    at_empty, at_surplus = empty, surplus
    for part in where:
        at_empty, at_surplus = at_empty[part], at_surplus[part]
    at_empty.clear()
    at_surplus["more"] = 1
    prefix = "".join(f"{part}." for part in where)
    missing = refused(empty)
    assert places(missing) == [prefix + key for key in keys.split(", ")]
    assert all(f"missing; the keys here are exactly {keys}:" in fault.msg for fault in missing.errors)
    loc, sentence = only_fault(surplus)
    assert loc == f"{prefix}more"
    assert f"unknown; the keys here are exactly {keys}:" in sentence


def test_instructions_must_be_present_though_nil() -> None:
    bare = {key: value for key, value in SAVE.items() if key != "instructions"}
    assert only_fault(job(questions={"q": bare}))[0] == "questions.q.instructions"


@pytest.mark.parametrize("model", ["cua-s1-4b-0.1", "", CONTRACT_MODEL + "\0", 5, None, True, b"cua-s1-4b-0.2", []])
def test_another_model_is_refused(model: object) -> None:
    loc, sentence = only_fault(job(model=model))
    assert loc == "model"
    assert f'only "{CONTRACT_MODEL}" is allowed' in sentence


@pytest.mark.parametrize("kind", ["score", "noul", "Choice", 1, None])
def test_another_type_of_question_is_refused(kind: object) -> None:
    loc, sentence = only_fault(question(type=kind))
    assert loc == "questions.q.type"
    assert 'only "choice" is allowed' in sentence


@pytest.mark.parametrize(("count", "sentence"), [(0, "there are 0 questions"), (9, "there are 9 questions")])
def test_a_job_has_1_to_8_questions(count: int, sentence: str) -> None:
    loc, found = only_fault(job(questions={str(index): SAVE for index in range(count)}))
    assert loc == "questions"
    assert f"{sentence}; 1 to 8 are allowed" in found


@pytest.mark.parametrize(("count", "sentence"), [(0, "there are 0 options"), (27, "there are 27 options")])
def test_a_question_has_1_to_26_options(count: int, sentence: str) -> None:
    loc, found = only_fault(question(criteria={str(index): None for index in range(count)}))
    assert loc == "questions.q.criteria"
    assert f"{sentence}; 1 to 26 are allowed" in found


@pytest.mark.parametrize("name", ["", "n" * 257])
def test_names_and_keys_have_1_to_256_characters(name: str) -> None:
    for value, what in ((job(questions={name: SAVE}), "question"), (question(criteria={name: None}), "option")):
        _, sentence = only_fault(value)
        assert f"the {what}'s name has {len(name)} characters; 1 to 256 are allowed" in sentence


@pytest.mark.parametrize("value", [5, 2.5, True, False, b"bytes"])
def test_numbers_booleans_and_binary_are_no_text(value: object) -> None:
    loc, sentence = only_fault(question(criteria={"ok": value}))
    assert loc == "questions.q.criteria.ok"
    assert "a string, a map, an array or nil is allowed" in sentence
    loc, sentence = only_fault(question(instructions=value))
    assert loc == "questions.q.instructions"
    assert "a string, a map, an array or nil is allowed" in sentence


@pytest.mark.parametrize("value", [None, 5, "text", b"x", ["a", "b"]])
def test_criteria_and_questions_are_maps(value: object) -> None:
    assert only_fault(question(criteria=value))[0] == "questions.q.criteria"
    assert only_fault(job(questions=value))[0] == "questions"
    assert only_fault(job(questions={"q": value}))[0] == "questions.q"


def test_binary_inside_a_goal_or_label_is_refused_where_it_stands() -> None:
    value = question(instructions={"a": [1, b"x"]}, criteria={"k": [[b"y"]]})
    assert places(refused(value)) == ["questions.q.instructions.a.1", "questions.q.criteria.k.0.0"]


@pytest.mark.parametrize("mark", ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"])
def test_the_images_marks_are_refused_in_every_text(mark: str) -> None:
    text = f"a {mark} b"
    expected = {
        "questions.q.instructions": question(instructions=text),
        "questions.q.instructions.a.0": question(instructions={"a": [text]}),
        f"questions.q.instructions.{text}": question(instructions={text: 1}),
        "questions.q.criteria.ok": question(criteria={"ok": text}),
        "questions.q.criteria.ok.0": question(criteria={"ok": [text]}),
        f"questions.q.criteria.{text}": question(criteria={text: None}),
        f"questions.{text}": job(questions={text: SAVE}),
    }
    for place, value in expected.items():
        loc, sentence = only_fault(value)
        assert loc == place
        assert mark in sentence


def test_other_special_tokens_are_taken() -> None:
    parsed(question(instructions="<|im_end|> <think> <|vision_pad|> <|image_pad |>"))


@pytest.mark.parametrize(
    ("instructions", "criteria", "characters"),
    [
        ("g" * 16_384, {"a": ""}, None),
        ("g" * 16_384, {"a": "x"}, 16_385),
        (None, {"a": "x" * 16_384}, None),
        (None, {"a": "\n" * 8_192}, None),
        (None, {"a": "\n" * 8_192, "b": None}, 16_385),
        (["g" * 16_380], {"a": "x"}, 16_385),
        ("é" * 16_380, {"keys": None, "b": ""}, None),
        ("é" * 16_380, {"key 2": None}, 16_385),
    ],
)
def test_goal_and_escaped_labels_have_at_most_16384_characters(
    instructions: object, criteria: dict[str, object], characters: int | None
) -> None:
    value = question(instructions=instructions, criteria=criteria)
    if characters is None:
        parsed(value)
    else:
        loc, sentence = only_fault(value)
        assert loc == "questions.q"
        assert f"have {characters:,} characters; at most 16,384" in sentence


@pytest.mark.parametrize("image", [None, 5, True, [], {}, ["x"]])
def test_an_image_is_binary_or_a_data_url(image: object) -> None:
    loc, sentence = only_fault(job(state={"image": image}))
    assert loc == "state.image"
    assert "send the PNG or JPEG file's bytes as binary, or a data URL" in sentence


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("", Code.INVALID_REQUEST),
        ("shot.png", Code.INVALID_REQUEST),
        ("https://example.org/shot.png", Code.INVALID_REQUEST),
        (" data:image/png;base64,AAAA", Code.INVALID_REQUEST),
        ("data:", Code.UNSUPPORTED_FORMAT),
        ("data:image/gif;base64,AAAA", Code.UNSUPPORTED_FORMAT),
        ("data:image/jpg;base64,AAAA", Code.UNSUPPORTED_FORMAT),
        ("data:IMAGE/PNG;base64,AAAA", Code.UNSUPPORTED_FORMAT),
        ("data:image/png;charset=x;base64,AAAA", Code.UNSUPPORTED_FORMAT),
        ("data:image/png,AAAA", Code.UNSUPPORTED_FORMAT),
        ("data:image/png;base64,AAA", Code.DECODE_FAILED),
        ("data:image/png;base64,AAA=A", Code.DECODE_FAILED),
        ("data:image/png;base64,AAA==", Code.DECODE_FAILED),
        ("data:image/png;base64,AAAA\n", Code.DECODE_FAILED),
        ("data:image/png;base64,AA AA", Code.DECODE_FAILED),
        ("data:image/png;base64,AA-_", Code.DECODE_FAILED),
        ("data:image/png;base64,ÄÄÄÄ", Code.DECODE_FAILED),
        ("data:image/png;base64,data:image/png;base64,AAAA", Code.DECODE_FAILED),
    ],
)
def test_other_strings_are_no_image(url: str, code: Code) -> None:
    loc, sentence = only_fault(job(state={"image": url}), code)
    assert loc == "state.image"
    assert len(sentence) < 250


def test_an_image_file_has_at_most_4_mib_in_either_form() -> None:
    data = bytes(limits.MAX_IMAGE_BYTES + 1)
    for image in (data, f"data:image/png;base64,{base64.b64encode(data).decode()}"):
        loc, sentence = only_fault(job(state={"image": image}), Code.IMAGE_TOO_LARGE)
        assert loc == "state.image"
        assert "4,194,305 bytes; at most 4,194,304" in sentence


def test_a_refusal_names_every_fault_with_its_place() -> None:
    refusal = refused(
        {
            "model": "other",
            "state": {"image": 1, "url": "x"},
            "extra": None,
            "questions": {
                "save": {"type": "score", "criteria": {"ok": True, "no": 1.5, "k": "<|image_pad|>"}},
                "": SAVE,
                "many": SAVE | {"criteria": {str(index): index for index in range(27)}},
                "long": SAVE | {"instructions": "x" * 16_384, "criteria": {"a": 5, "b": "xx"}},
                "no.map": 5,
                "nan": SAVE | {"criteria": {"a": math.nan, "b": "ok"}},
            },
        }
    )
    assert refusal.code == Code.INVALID_REQUEST
    assert sorted(places(refusal)) == sorted(
        [
            "model",
            "state.image",
            "state.url",
            "extra",
            "questions.save.type",
            "questions.save.instructions",
            "questions.save.criteria.ok",
            "questions.save.criteria.no",
            "questions.save.criteria.k",
            'questions.""',
            "questions.many.criteria",
            *(f"questions.many.criteria.{index}" for index in range(27)),
            "questions.long",
            "questions.long.criteria.a",
            'questions."no.map"',
            "questions.nan.criteria.a",
        ]
    )


def test_keys_that_are_no_text_are_named_at_every_level() -> None:
    broken: dict[object, object] = {"\ud800": 1, 5: 2, b"x": 3}
    value = job(state={"image": IMAGE} | broken, questions={"q": SAVE | {"criteria": {"a": None} | broken}} | broken)
    value["questions"]["q"] |= broken
    data = msgpack.packb(value | broken, unicode_errors="surrogatepass")
    with pytest.raises(RequestRefused) as caught:
        parse_request(data)
    assert caught.value.code == Code.MALFORMED_PAYLOAD
    expected = ['"\\udced\\udca0\\udc80"', "payload", "payload"]
    for level in ("state", "questions", "questions.q", "questions.q.criteria"):
        expected += [f'{level}."\\udced\\udca0\\udc80"', level, level]
    assert sorted(places(caught.value)) == sorted(expected)


def test_the_code_is_the_one_that_the_faults_share() -> None:
    url = "data:image/gif;base64,AAAA"
    assert refused(job(state={"image": url})).code == Code.UNSUPPORTED_FORMAT
    assert refused(job(state={"image": url}, model=5)).code == Code.INVALID_REQUEST
    assert refused(question(instructions=math.nan)).code == Code.MALFORMED_PAYLOAD


def test_a_refusals_body_is_the_contracts_json() -> None:
    body = json.loads(refused(question(type="score", criteria={})).body.to_json())
    assert list(body) == ["code", "detail", "errors"]
    assert body["code"] == "invalid_request"
    assert body["detail"].startswith("2 faults; the first: questions.q.")
    assert [list(error) for error in body["errors"]] == [["loc", "msg"]] * 2


def test_a_refusal_repeats_no_text_of_the_request() -> None:
    secret = "geheim" * 20
    refusal = refused(
        {
            "model": "x" * 40 + secret,
            "state": {"image": secret},
            "questions": {"x" * 40 + secret: {"type": "x" * 40 + secret, "instructions": 5, "criteria": [secret]}},
            secret + "more": secret,
        }
    )
    assert len(refusal.errors) == 6
    assert secret not in refusal.body.to_json() and secret not in str(refusal)
    assert all(len(fault.loc) < 200 and len(fault.msg) < 250 for fault in refusal.errors)


def test_hostile_names_are_escaped_in_places() -> None:
    names = ['a"b', "a.b", "line\nbreak", "\x1b[31m", "\u202e", " pad", "é", "two words"]
    refusal = refused(question(criteria=dict.fromkeys(names, 5)))
    expected = ['"a\\"b"', '"a.b"', '"line\\nbreak"', '"\\u001b[31m"', '"\\u202e"', '" pad"', "é", "two words"]
    assert places(refusal) == [f"questions.q.criteria.{name}" for name in expected]


def test_of_very_many_faults_the_first_are_named() -> None:
    for value in (
        question(criteria={str(index): 5 for index in range(1000)}),
        job(questions={str(index): 5 for index in range(1000)}),
        {str(index): 5 for index in range(1000)},
        question(instructions=[math.nan] * 1000),
        question(instructions=["<|image_pad|>"] * 1000),
    ):
        refusal = refused(value)
        assert len(refusal.errors) == MAX_NAMED_FAULTS + 1
        assert "more faults than these 256" in refusal.errors[-1].msg
        assert refusal.detail.startswith("over 256 faults")
