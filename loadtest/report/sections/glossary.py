"""How each figure is defined."""

from __future__ import annotations

from loadtest.report.blocks import section, terms
from loadtest.report.markup import Html

_TERMS = (
    ("TTFT", "Time to first token: from the sending of a request to the first token of its answer, "
     "whatever waiting there was included."),
    ("Time to publish", "To the first token that a reader sees; later than TTFT where a model "
     "thinks first."),
    ("TPOT", "Time per output token: from the first to the last token, divided by the tokens after "
     "the first. One value per answer."),
    ("Between tokens", "From one piece of an answer to the next. As many values per answer as it "
     "has pieces but one."),
    ("Whole answer", "From sending to the end of the answer."),
    ("p50, p95, p99", "The value within which 50, 95 or 99 of 100 values lie, interpolated between "
     "neighbours. Latencies are of whole answers only."),
    ("Promise", "A tenant's TTFT and TPOT limits. An answer keeps it if it is whole and within "
     "both; a request that failed or was refused breaks it."),
    ("Target", "The share of a tenant's requests that have to keep the promise."),
    ("95 % interval", "Where the true share lies, as surely as such intervals hold it in 95 of 100 "
     "runs (Wilson's score): few requests make it wide."),
    ("Goodput", "Requests per second that kept their promise; where nothing was promised, those "
     "answered whole."),
    ("From cache", "Share of the prompt tokens of whole answers that were not computed anew. "
     "Device is the memory that the model computes in, DRAM the host's, Redis is shared between "
     "hosts."),
    ("Cost", "The machine's price for the time of the run, or what the server charged, divided by "
     "the output tokens of whole answers."),
    ("Sent late", "How much later than planned the client sent. It is no part of any latency; if "
     "it is large, the load was not the one that was asked for."),
)  # fmt: skip


def glossary() -> Html:
    """The terms of the page."""
    return section("What the figures are", terms(_TERMS), key="terms")
