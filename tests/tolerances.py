"""Every tolerance of the tests, with its reason. Tests compare exactly where nothing is here."""

# peft multiplies the factors in float32, the tests in float64; relative to the largest element.
PEFT_DELTA_RTOL = 1e-6

# LoRA kernels against float64, by y's dtype: error over the sum of the magnitudes that were added.
LORA_KERNEL = {"float32": 1e-6, "bfloat16": 2**-8}

# silu(gate) * up against float64, by dtype, relative: a few float32 operations, rounded once.
GATED = {"float32": 1e-6, "bfloat16": 2**-8}

# float32 logits of a tiny model against transformers': largest absolute difference.
LOGITS_ATOL = 1e-4

# The same in bfloat16 against float32: 2^-8 a rounding, over two layers and logits of size 5.
BFLOAT16_LOGITS_ATOL = 0.3

# RoPE frequencies against transformers': float32 powers differ in the last bits between libraries.
ROPE_RTOL = 1e-6

# A logprob made from given float32 logits against float64: a sum over the vocabulary.
LOGPROB_ATOL = 1e-5

# A sum of an answer's float32 logprobs over HTTP against transformers'.
LOGLIKELIHOOD_ATOL = 1e-3

# Penalised, biased and filtered logits against transformers': a few float32 operations each.
PROCESSED_LOGITS_RTOL = 1e-5
