"""One request on the GPU: encode the image or find its state, run the questions from there, read out.

The tokens before the image are the same for every request; the state after them is computed once. A request's prefix is
always cut at the image's last token, so that a question's own tokens meet the same state, chunk borders and key order
whether the image ran in this pass, in an earlier one or in an earlier request: the same bits every way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch

from engine import image as images
from engine.errors import DeviceError, InferenceError
from engine.gpu.cache import ByteBoundCache
from engine.gpu.graphs import Graphs
from engine.gpu.workspace import PassInputs, SavedState, Staging, Workspace
from engine.model import Model, Segments, letter_logits, letter_probabilities
from engine.model.vision import GridTables
from engine.png import FilteredRows
from engine.prepared import Prepared
from engine.prompt import MAX_OPTIONS, MAX_PROMPT_TOKENS
from kernels.layout import MAX_SUFFIXES, PlacedSegments
from kernels.patches import pack_patches

logger = logging.getLogger(__name__)

Tensor = torch.Tensor
Grid = tuple[int, int, int]
Result = TypeVar("Result")

DEFAULT_IMAGE_CACHE_BYTES = 4 << 30
# Passes are padded to a multiple of this many rows, and one of more than the most is cut between questions.
ROWS_STEP = 64
MAX_ROWS = MAX_PROMPT_TOKENS
# Grids `(1, rows, columns)` in patches that are captured before the first job: 1280x800, 1024x1024, 1280x720, 1024x768,
# 512x512 and 256x256 pixels.
COMMON_GRIDS: tuple[Grid, ...] = ((1, 50, 80), (1, 64, 64), (1, 44, 80), (1, 48, 64), (1, 32, 32), (1, 16, 16))
# Up to these many rows, passes with and without a prefix are captured before the first job.
COMMON_ROWS = 2048
PATCH_PIXELS = images.SIDE_MULTIPLE_PIXELS // 2
# The most bytes of a picture before it is resized: RGBA, each row with its filter type.
MAX_PICTURE_BYTES = 4 * images.MAX_IMAGE_PIXELS + images.MAX_SIDE_PIXELS
# How many grids' tables are kept without a graph.
MAX_GRIDS = 64


@dataclass(frozen=True)
class Outcome:
    """Each question's probabilities over its letters, and where the GPU's time went."""

    probabilities: tuple[tuple[float, ...], ...]
    vision_ms: float
    language_ms: float


class GpuRunner:
    """A model on one GPU. Not to be shared between threads."""

    def __init__(
        self,
        model: Model,
        letter_rows: Tensor,
        head_ids: Sequence[int],
        *,
        eager: bool = False,
        image_cache_bytes: int = DEFAULT_IMAGE_CACHE_BYTES,
    ) -> None:
        """Set up the buffers and compute the state after the head.

        Args:
            model: on a CUDA device.
            letter_rows: `[L, D]`, of `LanguageModel.letter_rows`.
            head_ids: the constant tokens before the image.
            eager: never capture a graph.
            image_cache_bytes: bound of the kept image states; 0 keeps none.
        """
        self._model = model
        self._letter_rows = letter_rows
        self._device = model.language.embedding.device
        self._dtype = model.language.embedding.dtype
        self._workspace = Workspace(model.config.text, self._device, self._dtype)
        self._probabilities = torch.zeros(MAX_SUFFIXES, MAX_OPTIONS, device=self._device)
        self._inputs: dict[int, PassInputs] = {}
        self._staging: dict[tuple[int, int], Staging] = {}
        self._tables: dict[Grid, GridTables] = {}
        self._raw = torch.empty(MAX_PICTURE_BYTES, dtype=torch.uint8, device=self._device)
        self._raw_pinned = torch.empty(MAX_PICTURE_BYTES, dtype=torch.uint8, pin_memory=True)
        self.graphs = Graphs(self._device, enabled=not eager)
        self.images: ByteBoundCache[SavedState] = ByteBoundCache(image_cache_bytes)
        with torch.inference_mode():
            self._head = self._head_state(head_ids)

    def decide(self, request: Prepared, image_key: bytes) -> Outcome:
        """Answer a request.

        Args:
            request: prepared on the CPU.
            image_key: names the image's bytes; the same key must mean the same pixels.

        Raises:
            InferenceError: it does not fit into memory, even with nothing kept.
            DeviceError: the device must be given up.
        """
        try:
            return self._drained(lambda: self._decide(request, image_key))
        except torch.OutOfMemoryError:
            logger.warning("out of GPU memory: dropping graphs and kept images, trying once more")
            self._free()
        try:
            return self._drained(lambda: self._decide(request, image_key))
        except torch.OutOfMemoryError as error:
            self._free()
            raise InferenceError("the GPU's memory does not hold this request") from error

    def warm_up(self) -> None:
        """Compile and capture what common requests need."""
        with torch.inference_mode():
            if self.graphs.enabled:
                for grid in COMMON_GRIDS:
                    for picture in _blank_pictures(PATCH_PIXELS * grid[1], PATCH_PIXELS * grid[2]):
                        self._encode(self._stage_picture(picture), grid)
                        torch.cuda.synchronize(self._device)  # the next one takes the same pinned memory
                for rows in range(ROWS_STEP, COMMON_ROWS + 1, ROWS_STEP):
                    for prefix_tokens in (0, rows // 2):
                        self._workspace.load(self._head)
                        placed = Segments(prefix_tokens, (rows - prefix_tokens,))
                        self._run_pass(self._stage(_blank_inputs(placed), 0), placed)
                        torch.cuda.synchronize(self._device)
            self.capture_pending()

    def capture_pending(self, most: int | None = None) -> int:
        """Capture graphs of what has run without one, at most so many; for when no job waits. Returns how many."""
        with torch.inference_mode():
            return self.graphs.capture_pending(most)

    def _decide(self, request: Prepared, image_key: bytes) -> Outcome:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]  # type: ignore[no-untyped-call]
        kept = self.images.get(image_key) if self.images.bound_bytes else None
        # What the GPU begins with lies in pinned memory before its time is taken; of a new picture, the questions
        # follow while it is encoded.
        if kept is None:
            raw = self._stage_picture(request.picture)
            marks[0].record()
            self._encode(raw, request.grid)
            marks[1].record()
            self._workspace.load(self._head)
            passes = self._stage_passes(request, with_prefix=True)
        else:
            passes = self._stage_passes(request, with_prefix=False)
            marks[0].record()
            marks[1].record()
            self._workspace.load(kept)
        for staging, segments in passes:
            self._run_pass(staging, segments)
        marks[2].record()
        if kept is None:
            self._keep_image(image_key, request.segments.prefix_tokens)
        marks[2].synchronize()
        rows = [row for staging, segments in passes for row in staging.answer[: len(segments.suffix_tokens)].tolist()]
        return Outcome(
            tuple(tuple(row[:count]) for row, count in zip(rows, request.options, strict=False)),
            marks[0].elapsed_time(marks[1]),
            marks[1].elapsed_time(marks[2]),
        )

    def _stage_picture(self, raw: images.Picture) -> images.Picture:
        """The picture in pinned memory."""
        return _moved(raw, lambda rows: _view(self._raw_pinned, rows).copy_(rows))

    def _encode(self, staged: images.Picture, grid: Grid) -> None:
        """The image's rows, into the workspace, without waiting."""
        tables = self._tables.get(grid)
        if tables is None:
            if len(self._tables) >= MAX_GRIDS:
                self._forget_grids()
            tables = self._tables[grid] = self._model.vision.grid_tables(grid)
        picture = _moved(staged, lambda rows: _view(self._raw, rows).copy_(rows, non_blocking=True))
        if images.size_of(picture) != (PATCH_PIXELS * grid[1], PATCH_PIXELS * grid[2]):
            resized = images.resize(images.pixels_of(picture))
            picture = _view(self._raw, resized).copy_(resized)
        channels = picture.channels if isinstance(picture, FilteredRows) else None
        self.graphs.run(("vision", grid, channels), partial(self._encode_picture, picture, grid, tables))

    def _encode_picture(self, picture: images.Picture, grid: Grid, tables: GridTables) -> None:
        features = self._model.vision(pack_patches(images.pixels_of(picture), dtype=self._dtype), grid, tables)
        self._workspace.features[: len(features)].copy_(features)

    def _forget_grids(self) -> None:
        """Tables and graphs belong together: a graph reads those of its grid."""
        self.graphs.clear()
        self._tables.clear()

    def _stage_passes(self, request: Prepared, with_prefix: bool) -> list[tuple[Staging, Segments]]:
        """A request's passes in pinned memory; each has staging of its own, since nothing waits between them."""
        passes = request_passes(request, with_prefix)
        return [(self._stage(host, number), segments) for number, (host, segments) in enumerate(passes)]

    def _stage(self, host: PassInputs, number: int) -> Staging:
        staging = self._staging.get((host.rows, number))
        if staging is None:
            inputs = self._inputs.get(host.rows)
            if inputs is None:
                inputs = self._inputs[host.rows] = PassInputs(host.rows, self._device)
            staging = self._staging[host.rows, number] = Staging(inputs)
        staging.numbers.copy_(host.numbers)
        return staging

    def _run_pass(self, staging: Staging, segments: Segments) -> None:
        """A pass from the workspace's state: probabilities, and, with a prefix, the state at its end."""
        inputs = staging.inputs
        inputs.fill(staging)
        placed = PlacedSegments(segments.prefix_tokens, segments.suffix_tokens, inputs.layout)
        key = ("language", inputs.rows, segments.prefix_tokens > 0)
        self.graphs.run(key, partial(self._prefill, inputs, placed))
        staging.answer.copy_(self._probabilities, non_blocking=True)

    def _prefill(self, inputs: PassInputs, placed: PlacedSegments) -> None:
        language, workspace = self._model.language, self._workspace
        features = workspace.features.index_select(0, inputs.image_tokens.clamp(min=0))
        hidden = torch.where(inputs.image_tokens[:, None] >= 0, features, language.embed(inputs.ids))
        last, end = language.prefill(hidden, inputs.positions, placed, workspace.state)
        if placed.prefix_tokens:
            workspace.keep_convolutions(end)
        logits = letter_logits(last, self._letter_rows)
        self._probabilities.copy_(letter_probabilities(logits, inputs.options))

    def _head_state(self, head_ids: Sequence[int]) -> SavedState:
        self._workspace.reset()
        segments = Segments(len(head_ids), ())
        host = _blank_inputs(segments)
        host.ids[: len(head_ids)] = torch.tensor(head_ids, dtype=torch.int32)
        host.positions[:, : len(head_ids)] = torch.arange(len(head_ids))
        self._run_pass(self._stage(host, 0), segments)
        return self._workspace.save(len(head_ids))

    def _keep_image(self, image_key: bytes, tokens: int) -> None:
        if self.images.make_room(self._workspace.saved_bytes(tokens)):
            self.images.put(image_key, self._workspace.save(tokens))

    def _drained(self, work: Callable[[], Result]) -> Result:
        """Do the work; if it fails, wait until the device has nothing of it left."""
        try:
            with torch.inference_mode():
                return work()
        except Exception as error:
            try:
                torch.cuda.synchronize(self._device)
            except Exception as sticky:
                raise DeviceError(f"the GPU no longer answers ({type(sticky).__name__}: {sticky})") from error
            raise

    def _free(self) -> None:
        """Drop everything that is kept only to be faster."""
        self.images.clear()
        self._forget_grids()
        torch.cuda.empty_cache()


def _moved(picture: images.Picture, move: Callable[[Tensor], Tensor]) -> images.Picture:
    """A picture whose bytes were moved."""
    if isinstance(picture, FilteredRows):
        return replace(picture, rows=move(picture.rows))
    return move(picture)


def _view(memory: Tensor, like: Tensor) -> Tensor:
    """The beginning of some bytes, in the shape of others."""
    return memory[: like.numel()].view(like.shape)


def _blank_pictures(height: int, width: int) -> list[images.Picture]:
    """A black picture, decoded and as the scanlines of an RGB and of an RGBA file."""
    scanlines = [
        FilteredRows(torch.zeros(height, 1 + channels * width, dtype=torch.uint8), channels) for channels in (3, 4)
    ]
    return [torch.zeros(height, width, 3, dtype=torch.uint8), *scanlines]


def _capacity(rows: int) -> int:
    return -(-rows // ROWS_STEP) * ROWS_STEP


def request_passes(request: Prepared, with_prefix: bool) -> list[tuple[PassInputs, Segments]]:
    """A request's passes: the image with as many questions as fit, then the others from its state."""
    image = slice(request.head_tokens, request.segments.prefix_tokens)
    passes: list[tuple[PassInputs, Segments]] = []
    suffixes = list(zip(request.segments.suffixes, request.options, strict=True))
    past_tokens = request.head_tokens if with_prefix else request.segments.prefix_tokens
    prefix_tokens = image.stop - image.start if with_prefix else 0
    while suffixes:
        taken: list[tuple[slice, int]] = []
        tokens = prefix_tokens
        while suffixes and len(taken) < MAX_SUFFIXES:
            rows = suffixes[0][0]
            if taken and tokens + rows.stop - rows.start > MAX_ROWS:
                break
            tokens += rows.stop - rows.start
            taken.append(suffixes.pop(0))
        segments = Segments(prefix_tokens, tuple(rows.stop - rows.start for rows, _ in taken))
        parts = [*([image] if prefix_tokens else []), *(rows for rows, _ in taken)]
        places = torch.cat([torch.arange(part.start, part.stop) for part in parts])
        passes.append((_host_inputs(request, places, segments, past_tokens, [count for _, count in taken]), segments))
        prefix_tokens, past_tokens = 0, request.segments.prefix_tokens
    return passes


def _host_inputs(
    request: Prepared, places: Tensor, segments: Segments, past_tokens: int, options: Sequence[int]
) -> PassInputs:
    host = _blank_inputs(segments, past_tokens)
    tokens = segments.tokens
    host.ids[:tokens] = request.ids[places]
    host.image_tokens[:tokens] = request.image_tokens[places]
    host.positions[:, :tokens] = request.positions[:, places]
    host.options[: len(options)] = torch.tensor(options, dtype=torch.int32)
    return host


def _blank_inputs(segments: Segments, past_tokens: int = 0) -> PassInputs:
    """A pass's inputs on the CPU before its tokens are put in: no image, and every question of one letter."""
    host = PassInputs(_capacity(segments.tokens), "cpu")
    host.layout.fill(segments, past_tokens)
    host.image_tokens.fill_(-1)
    host.options.fill_(1)
    return host
