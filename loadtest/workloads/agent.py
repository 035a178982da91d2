"""Agents: a task, and tools whose results come back into the chat until it is done."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any, Literal

import orjson
from pydantic import Field

from loadtest.plan import Message, Session, Turn
from loadtest.vocabulary import Vocabulary
from loadtest.workloads.base import Workload
from loadtest.workloads.randomness import drawer
from loadtest.workloads.text import WORDS, text

_ARGUMENTS = 2


class Agent(Workload):
    """A long beginning that all agents share, and a chat that grows by an answer and a tool's
    result with each step.

    The tools' JSON schema stands in the system prompt, or in the request's `tools` for servers that
    take those (forebay refuses them); `tool_choice` is "none" then, because only text can be asked
    for by length. Results are the user's messages, as in ReAct: a message of the role "tool" would
    have to answer a call that the model may not have made. Lengths are words.
    """

    name = "agent"
    help = "agent loops: system prompt, tools' schema, a task, and a tool's result at each step"

    steps: int = Field(default=6, ge=1, description="answers until an agent is done")
    system_words: int = Field(default=150, ge=1, description="length of the instructions")
    tools: int = Field(default=6, ge=1, description="how many tools are described")
    tool_words: int = Field(default=16, ge=1, description="length of each description")
    tools_in: Literal["system", "field"] = Field(
        default="system", description="system: in the system prompt; field: the request's tools"
    )
    task_words: int = Field(default=40, ge=1, description="length of the task")
    result_words: int = Field(default=100, ge=1, description="length of a tool's result")
    tool_s: float = Field(default=0.5, ge=0, description="how long a tool takes")
    output_tokens: int = Field(default=48, ge=1, description="length of each answer")
    exact: bool = Field(default=True, description="whether answers have exactly that length")

    def sessions(self, seed: int, vocabulary: Vocabulary) -> Iterator[Session]:  # noqa: ARG002
        """Without end. Texts have no use for the vocabulary."""
        base = f"{self.name}/{seed}"
        schema = self._schema(base)
        instructions = text(f"{base}/system", self.system_words)
        fields: dict[str, Any] = {}
        if self.tools_in == "field":
            fields = {"tools": schema, "tool_choice": "none"}
        else:
            instructions = f"{instructions}\n\nTools:\n{orjson.dumps(schema).decode()}"
        system: Message = {"role": "system", "content": instructions}
        for number in count():
            yield Session(
                tuple(
                    Turn(
                        self.output_tokens,
                        messages=(*([] if step else [system]), self._given(base, number, step)),
                        label=f"step {step + 1}",
                        think_s=self.tool_s if step else 0.0,
                        exact=self.exact,
                        fields=fields,
                    )
                    for step in range(self.steps)
                )
            )

    def _given(self, base: str, agent: int, step: int) -> Message:
        """The task, or what the tool that was used last gave."""
        if step == 0:
            content = text(f"{base}/{agent}/task", self.task_words)
        else:
            content = f"Result: {text(f'{base}/{agent}/{step}', self.result_words)}"
        return {"role": "user", "content": content}

    def _schema(self, base: str) -> list[dict[str, Any]]:
        draw = drawer(f"{base}/tools")
        return [
            {
                "type": "function",
                "function": {
                    "name": f"{draw.choice(WORDS)}_{draw.choice(WORDS)}_{number}",
                    "description": text(f"{base}/tool/{number}", self.tool_words),
                    "parameters": {
                        "type": "object",
                        "properties": {
                            name: {"type": "string"} for name in draw.sample(WORDS, _ARGUMENTS)
                        },
                    },
                },
            }
            for number in range(self.tools)
        ]
