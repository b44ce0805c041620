"""Kinds of pipeline schedules, by name. `shoal.pipeline.schedules` builds them."""

ASYNCHRONOUS = ("pipedream", "pipedream-2bw")
"""Schedules that update weights while micro-batches are in flight, so that they do not compute one device's step."""

SLICED = ("terapipe",)
"""Schedules that cut sequences into slices."""

PAIRED = ("dualpipe", "dualpipev")
"""Schedules that pair forwards with backwards of other micro-batches; each hides the other's exchanges of rows."""

SPLIT_BACKWARD = (
    "zb-h1", "zb-h2", "interleaved-zb", "zb-v", "v-half", "v-min", "zb-auto", "dualpipe", "dualpipev",
)  # fmt: skip
"""Schedules that compute gradients of activations and of weights separately (zero bubble)."""
