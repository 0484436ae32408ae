"""Read this first: one request's way through the engine.

`Engine.decide` is the main line: prepare -> encode the image -> prefill -> read out. The image is encoded once a
request; the system text and the image run through the language model once, and every question's own tokens continue
from there in the same packed pass. It knows no queue: bytes and questions in, probabilities out.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise

import torch

from engine import image as images
from engine.checkpoint import CheckpointPaths, Identity
from engine.checkpoint.report import Report, silent
from engine.errors import Fault, Refusal
from engine.gpu import DEFAULT_IMAGE_CACHE_BYTES, GpuRunner
from engine.model import Model, Segments, letter_logits, letter_probabilities
from engine.prepared import Prepared
from engine.prompt import MAX_PROMPT_TOKENS, PromptEncoder, Question, positions, too_long
from engine.start import verify_and_load
from engine.warm_up import warm_up
from kernels.patches import pack_patches


@dataclass(frozen=True)
class Timings:
    """Where a decision's time went, in milliseconds: CPU preparation, vision encoder, language model with read-out."""

    prepare_ms: float
    vision_ms: float
    language_ms: float


@dataclass(frozen=True)
class Decision:
    """A request's outcome: for each question, in order, the probability of each of its options, in order.

    `input_tokens` sums every question's whole prompt.
    """

    probabilities: tuple[tuple[float, ...], ...]
    input_tokens: int
    timings: Timings


@dataclass(frozen=True)
class Stats:
    """An engine's counts; all 0 on the CPU, where nothing is kept.

    Screenshots whose state was found or not, and the kept states' bytes; CUDA graphs captured; the GPU memory in use,
    and what PyTorch holds of it.
    """

    image_cache_hits: int = 0
    image_cache_misses: int = 0
    image_cache_bytes: int = 0
    graphs: int = 0
    allocated_bytes: int = 0
    reserved_bytes: int = 0


class Engine:
    """One loaded checkpoint on one device. Decisions are made one at a time; `prepare` may run beside them."""

    def __init__(
        self,
        model: Model,
        encoder: PromptEncoder,
        identity: Identity,
        device: torch.device,
        *,
        eager: bool = False,
        image_cache_bytes: int = DEFAULT_IMAGE_CACHE_BYTES,
    ) -> None:
        self.identity = identity
        self.device = device
        self._model = model
        self._encoder = encoder
        # On a GPU a plain PNG's filters are its work; on the CPU Pillow decodes every file.
        self._filtered_pictures = device.type == "cuda"
        self._letter_rows = model.language.letter_rows(encoder.letter_ids)
        self._runner = (
            GpuRunner(model, self._letter_rows, encoder.head_ids, eager=eager, image_cache_bytes=image_cache_bytes)
            if device.type == "cuda"
            else None
        )

    @classmethod
    def load(
        cls,
        checkpoint: CheckpointPaths,
        *,
        device: torch.device | str,
        dtype: torch.dtype = torch.bfloat16,
        eager: bool = False,
        image_cache_bytes: int = DEFAULT_IMAGE_CACHE_BYTES,
        report: Report = silent,
    ) -> Engine:
        """Verify every byte of a checkpoint, load it, and look once more that nothing was swapped in between.

        Args:
            checkpoint: its folders (`open_checkpoint`).
            device: `cpu` or `cuda:<index>`.
            dtype: the model dtype: bfloat16, or float32 as a reference.
            eager: on a GPU, never capture a graph.
            image_cache_bytes: on a GPU, how much memory the states of past screenshots may take; 0 keeps none.
            report: told the phase and its progress in bytes.

        Raises:
            CheckpointError: anything missing, left over, changed or not of this layout.
        """
        device = torch.device(device)
        verified, loaded = verify_and_load(checkpoint, device, dtype, report)
        verified.recheck()
        encoder = PromptEncoder(loaded.tokenizer)
        return cls(loaded.model, encoder, verified.identity, device, eager=eager, image_cache_bytes=image_cache_bytes)

    def decide(self, image: bytes, questions: Sequence[Question], *, media_type: str | None = None) -> Decision:
        """Each question's probabilities over its options, for one screenshot.

        Args:
            image: a PNG or JPEG file's bytes.
            questions: at least one.
            media_type: the label of the data URL that the image came in, if it did.

        Raises:
            Refusal: the image or a prompt is not allowed; every fault found is named.
            InferenceError: the GPU's memory does not hold the request; the next one may be answered.
            DeviceError: the GPU must be given up, and the process with it.
        """
        return self.decide_prepared(self.prepare(image, questions, media_type))

    @torch.inference_mode()
    def decide_prepared(self, prepared: Prepared) -> Decision:
        """The model's part of `decide`, one request at a time and always in the same thread.

        Raises:
            InferenceError, DeviceError: as `decide`.
        """
        if self._runner is not None:
            outcome = self._runner.decide(prepared, prepared.image_key)
            spent = Timings(prepared.prepare_ms, outcome.vision_ms, outcome.language_ms)
            return Decision(outcome.probabilities, prepared.input_tokens, spent)
        laps_s = [time.perf_counter()]
        features = self._encode(prepared)
        laps_s.append(time.perf_counter())
        probabilities = self._read_out(self._prefill(prepared, features), prepared.options)
        laps_s.append(time.perf_counter())
        spans_ms = [(end - start) * 1e3 for start, end in pairwise(laps_s)]
        return Decision(probabilities, prepared.input_tokens, Timings(prepared.prepare_ms, *spans_ms))

    def warm_up(self, report: Report = silent) -> None:
        """Real decisions at both ends of what is allowed, checked; an engine is not ready before.

        Raises:
            WarmUpError: a case failed, or did not come out finite, normalised and repeatable.
        """
        if self._runner is not None:
            self._runner.warm_up()
        warm_up(lambda image, questions: self.decide(image, questions).probabilities, report)

    def capture_pending(self, most: int | None = None) -> int:
        """On a GPU, capture graphs of what has run without one, at most so many: for when no job waits.

        Returns:
            How many were captured; 0 when there is nothing left to do.
        """
        return self._runner.capture_pending(most) if self._runner is not None else 0

    def stats(self) -> Stats:
        """What has been kept and used so far. May be called from any thread; it waits for nothing."""
        if self._runner is None:
            return Stats()
        return Stats(
            image_cache_hits=self._runner.images.hits,
            image_cache_misses=self._runner.images.misses,
            image_cache_bytes=self._runner.images.size_bytes,
            graphs=len(self._runner.graphs),
            allocated_bytes=torch.cuda.memory_allocated(self.device),
            reserved_bytes=torch.cuda.memory_reserved(self.device),
        )

    def check_image(self, image: bytes, media_type: str | None = None) -> tuple[Fault, ...]:
        """Every fault that the image file's header shows, without decoding it."""
        return images.check_image(image, media_type)

    def prepare(self, image: bytes, questions: Sequence[Question], media_type: str | None = None) -> Prepared:
        """The CPU's part of `decide`: picture, tokens, positions. Touches neither the model nor the device.

        It may run in another thread beside `decide_prepared`.

        Raises:
            Refusal: as `decide`.
        """
        assert questions, "a request has at least one question"
        started_s = time.perf_counter()
        picture = images.open_picture(image, media_type, filtered=self._filtered_pictures)
        rows, columns = (side // images.SIDE_MULTIPLE_PIXELS for side in images.resized_size(*images.size_of(picture)))
        head = [*self._encoder.head_ids, *[self._encoder.image_pad_id] * (rows * columns)]
        tails = [self._encoder.tail_ids(question) for question in questions]
        prompt_tokens = [len(head) + len(tail) for tail in tails]
        _refuse_long_prompts(questions, prompt_tokens)

        # The prefix always ends with the image, so that a question meets the same state and the same chunks of the
        # delta rule whatever else is asked.
        cut = len(head)
        parts = [torch.tensor(tail) for tail in tails]
        ids = torch.cat([torch.tensor(head), *parts])
        axes = positions(len(self._encoder.head_ids), (rows, columns), max(map(len, tails)))
        places = torch.cat([torch.arange(cut), *(torch.arange(cut, cut + len(part)) for part in parts)])
        return Prepared(
            image_key=sha256(image).digest(),
            picture=picture,
            grid=(1, 2 * rows, 2 * columns),
            ids=ids,
            positions=axes[:, places],
            image_tokens=torch.where(ids == self._encoder.image_pad_id, places - len(self._encoder.head_ids), -1),
            segments=Segments(cut, tuple(map(len, parts))),
            options=tuple(len(question.labels) for question in questions),
            head_tokens=len(self._encoder.head_ids),
            input_tokens=sum(prompt_tokens),
            prepare_ms=(time.perf_counter() - started_s) * 1e3,
        )

    def _encode(self, prepared: Prepared) -> torch.Tensor:
        """The image's rows for the language model, `[image tokens, D]`, model dtype."""
        pixels = images.resize(images.pixels_of(prepared.picture.to(self.device)))
        return self._model.vision(pack_patches(pixels), prepared.grid)

    def _prefill(self, prepared: Prepared, features: torch.Tensor) -> torch.Tensor:
        """Every question's last row, `[K, D]`, model dtype."""
        image_tokens = prepared.image_tokens.to(self.device)
        text = self._model.language.embed(prepared.ids.to(self.device))
        hidden = torch.where(image_tokens[:, None] >= 0, features[image_tokens.clamp(min=0)], text)
        last, _ = self._model.language.prefill(hidden, prepared.positions.to(self.device), prepared.segments)
        return last

    def _read_out(self, last: torch.Tensor, options: tuple[int, ...]) -> tuple[tuple[float, ...], ...]:
        rows = letter_probabilities(letter_logits(last, self._letter_rows), options).tolist()
        return tuple(tuple(row[:count]) for row, count in zip(rows, options, strict=True))


def _refuse_long_prompts(questions: Sequence[Question], prompt_tokens: Sequence[int]) -> None:
    faults = tuple(
        Fault(f"questions.{question.name}", too_long(question, tokens), "prompt_too_long")
        for question, tokens in zip(questions, prompt_tokens, strict=True)
        if tokens > MAX_PROMPT_TOKENS
    )
    if faults:
        raise Refusal(faults)
