"""Read this first: the model's arithmetic, each piece a function of tensors that knows no layer and no checkpoint.

Every function stands where one fused GPU kernel can stand, and rounds where Transformers 5.17 rounds when the model
runs in BF16, so that BF16 runs stay close to that reference (on a GPU `lora` rounds less often, and says so). The plain
PyTorch here is each function's meaning.

One glossary: T tokens, N patches, D hidden width, H heads, K key heads, V value heads, d a head's width, C channels.
"The model dtype" is bfloat16 or float32. Rows of tokens are packed as `segments.Segments` says.
"""
