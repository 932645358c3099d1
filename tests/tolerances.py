"""Every tolerance of the tests, with its reason. Tests compare exactly where nothing is here."""

# peft multiplies the factors in float32, the tests in float64; relative to the largest element.
PEFT_DELTA_RTOL = 1e-6
