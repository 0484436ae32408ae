"""Every limit of the contract (sections 1 and 2), once for the producer. The prompt's tokens are the engine's."""

from __future__ import annotations

MAX_PAYLOAD_BYTES = 8 * 2**20
MAX_IMAGE_BYTES = 4 * 2**20
# Arrays and maps in one another, the outermost map counted.
MAX_NESTING = 127
# Twice what fits into a request that keeps the other limits. It keeps 8 MiB of one-byte empty arrays from becoming half
# a gigabyte of Python objects.
MAX_VALUES = 262_144

MAX_QUESTIONS = 8
MAX_OPTIONS = 26
# Of a question's name, and of an option's key.
MAX_NAME_CHARACTERS = 256
# Of a question's goal and escaped labels together.
MAX_QUESTION_CHARACTERS = 16_384

# Of the picture: a producer that can read its size refuses what the engine would.
MAX_SIDE_PIXELS = 2048
MAX_IMAGE_PIXELS = 1_048_576
MAX_ASPECT_RATIO = 200

# What a queue holds before producers are refused, unless they are told another bound.
MAX_WAITING_JOBS = 256
MAX_WAITING_BYTES = 512 * 2**20
