"""Documents that are asked about again and again."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from pydantic import Field

from loadtest.plan import Session
from loadtest.vocabulary import Vocabulary
from loadtest.workloads.base import Api, Workload
from loadtest.workloads.parts import Part, turn_of
from loadtest.workloads.randomness import drawer
from loadtest.workloads.zipf import ZipfChoice


class Rag(Workload):
    """A prompt is instructions that all have, a document and a question, in this order: so the
    document's KV can be found. "first" is the first question to a document, "again" any other."""

    name = "rag"
    help = "documents with many questions each: instructions, then the document, then the question"

    documents: int = Field(default=16, ge=1, description="how many documents there are")
    questions: int = Field(default=8, ge=1, description="how many requests for each, on average")
    document_tokens: int = Field(default=1024, ge=1, description="length of a document")
    instruction_tokens: int = Field(default=32, ge=1, description="length of what stands before it")
    question_tokens: int = Field(default=32, ge=1, description="length of a question")
    output_tokens: int = Field(default=32, ge=1, description="length of the answer")
    zipf: float | None = Field(
        default=None,
        ge=0,
        description="documents are drawn with this exponent; unset: they take turns",
    )
    api: Api = Field(default="completions", description="completions: token ids; chat: words")
    exact: bool = Field(default=True, description="whether answers have exactly that length")

    def sessions(self, seed: int, vocabulary: Vocabulary) -> Iterator[Session]:
        """Without end."""
        base = f"{self.name}/{seed}"
        seen = set[int]()
        for number, document in enumerate(self._documents(base)):
            parts = (
                Part(f"{base}/instructions", self.instruction_tokens, "system"),
                Part(f"{base}/document/{document}", self.document_tokens),
                Part(f"{base}/question/{number}", self.question_tokens),
            )
            label = "again" if document in seen else "first"
            seen.add(document)
            turn = turn_of(
                parts,
                vocabulary,
                api=self.api,
                output_tokens=self.output_tokens,
                exact=self.exact,
                label=label,
            )
            yield Session((turn,))

    @property
    def usual_requests(self) -> int:
        """All questions."""
        return self.documents * self.questions

    def _documents(self, base: str) -> Iterator[int]:
        if self.zipf is None:
            yield from (number % self.documents for number in count())
            return
        choice = ZipfChoice(self.documents, self.zipf, drawer(f"{base}/documents"))
        while True:
            yield choice.next()
