"""The official client's files and batches against the API, on both databases."""

from __future__ import annotations

import json

import openai
import pytest
from openai import AsyncOpenAI

from gateway.batches.line_answer import LineAnswer
from gateway.database.opening import Database
from tests.gateway.batches.stage import PATH, BatchStage, FakeLines, answered, jsonl, line
from tests.gateway.stage import K1, K2


def client_of(stage: BatchStage, key: str = K1) -> AsyncOpenAI:
    return AsyncOpenAI(
        api_key=key, base_url="http://forebay/v1", http_client=stage.client(key), max_retries=0
    )


async def refuse_two(name: str) -> LineAnswer:
    return answered("bad", 400) if name == "two" else answered(name)


async def test_a_batch_from_upload_to_results(database: Database):
    stage = BatchStage(database)
    lines = FakeLines(refuse_two)
    odd = "to Python a line's\u2028end"
    async with stage.gateway(lines), client_of(stage) as client:
        content = jsonl(line("one"), line("two"), line(odd))
        file = await client.files.create(file=("my in.jsonl", content), purpose="batch")
        assert (file.bytes, file.filename, file.purpose) == (len(content), "my in.jsonl", "batch")
        assert file.expires_at == file.created_at + 30 * 86_400
        assert (await client.files.content(file.id)).content == content

        made = await client.batches.create(
            input_file_id=file.id,
            endpoint=PATH,
            completion_window="24h",
            metadata={"why": "night"},
        )
        assert (made.status, made.metadata) == ("validating", {"why": "night"})
        assert made.expires_at == made.created_at + 86_400
        await stage.until(made.id, "completed")

        batch = await client.batches.retrieve(made.id)
        assert batch.request_counts.model_dump() == {"total": 3, "completed": 2, "failed": 1}
        assert batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
        output = (await client.files.content(batch.output_file_id)).text.splitlines()
        first = json.loads(output[0])
        assert [json.loads(each)["custom_id"] for each in output] == ["one", odd]
        assert first["error"] is None
        assert first["response"] == {
            "status_code": 200,
            "request_id": "req-one",
            "body": {"text": "one"},
        }
        assert {first["id"]} == lines.line_ids["one"]
        [error] = (await client.files.content(batch.error_file_id)).text.splitlines()
        assert json.loads(error)["response"]["status_code"] == 400
        assert {each.tenant.id for each in lines.callers} == {"acme"}

        assert [each.id async for each in client.batches.list(limit=1)] == [made.id]
        listed = [each async for each in client.files.list(limit=1)]
        assert {each.id for each in listed} == {
            file.id,
            batch.output_file_id,
            batch.error_file_id,
        }
        outputs = [each.id async for each in client.files.list(purpose="batch_output")]
        assert file.id not in outputs
        assert len(outputs) == 2
        oldest = [each.id async for each in client.files.list(order="asc")]
        assert oldest[0] == file.id

        with pytest.raises(openai.ConflictError, match="completed cannot be cancelled"):
            await client.batches.cancel(made.id)
        assert (await client.files.delete(file.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(file.id)


async def test_what_is_wrong_with_an_input_is_said_by_line(sqlite: Database):
    stage = BatchStage(sqlite)
    async with stage.gateway(), client_of(stage) as client:
        content = jsonl(line("one"), line("one")) + b"{\n\n" + jsonl(line("x", body={"n": 99}))
        file = await client.files.create(file=content, purpose="batch")
        made = await client.batches.create(
            input_file_id=file.id, endpoint=PATH, completion_window="24h"
        )
        await stage.until(made.id, "failed")
        batch = await client.batches.retrieve(made.id)
        assert batch.failed_at
        assert batch.request_counts.total == 0
        assert [(e.line, e.code, e.param) for e in batch.errors.data] == [
            (2, "duplicate_custom_id", "custom_id"),
            (3, "invalid_json_line", None),
            (5, "invalid_request", "body.n"),
        ]


async def test_tenants_do_not_see_each_other(database: Database):
    stage = BatchStage(database)
    async with stage.gateway(), client_of(stage, K2) as other:
        batch_id = await stage.begin(jsonl(line("one")))
        batch = await stage.until(batch_id, "completed")
        input_file, output_file = batch["input_file_id"], batch["output_file_id"]
        for file_id in (input_file, output_file):
            for asked in (other.files.retrieve, other.files.content, other.files.delete):
                with pytest.raises(openai.NotFoundError):
                    await asked(file_id)
        for asked in (other.batches.retrieve, other.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                await asked(batch_id)
        with pytest.raises(openai.BadRequestError) as refused:
            await other.batches.create(
                input_file_id=input_file, endpoint=PATH, completion_window="24h"
            )
        assert refused.value.param == "input_file_id"
        with pytest.raises(openai.BadRequestError):  # an output is no input
            await client_of(stage).batches.create(
                input_file_id=output_file, endpoint=PATH, completion_window="24h"
            )
        assert [each async for each in other.files.list()] == []
        assert [each async for each in other.batches.list()] == []
        assert await stage.file_lines(output_file)


async def test_lines_are_answered_as_requests_are(sqlite: Database):
    stage = BatchStage(sqlite)
    async with stage.gateway(stage.tenancy.lines):
        too_long = line("long", body={"messages": [{"role": "user", "content": "x" * 600}]})
        # a seed gives the same answer in a batch and outside
        seeded = line("seeded", body={"seed": 5})
        batch = await stage.until(await stage.begin(jsonl(seeded, too_long)), "completed")
        output, errors = await stage.results(batch)
        alone = await stage.post(PATH, seeded["body"])
    answer = output["seeded"]["response"]["body"]
    assert answer["choices"] == alone["choices"]
    assert answer["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]
    refused = errors["long"]["response"]
    assert refused["status_code"] == 400
    assert refused["body"]["error"]["code"] == "context_length_exceeded"
    assert refused["request_id"].startswith(errors["long"]["id"])
    assert stage.inner.metric("forebay_requests_total", endpoint="chat", tenant="acme") == 3
