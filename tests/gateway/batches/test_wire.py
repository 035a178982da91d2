"""What is asked of /v1/files and /v1/batches, read."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest

from gateway.batches.ids import first_id, is_id, new_id
from gateway.database.opening import Database
from gateway.errors import ApiError
from gateway.wire import batches, files
from tests.gateway.batches.stage import PATH, BatchStage, lines

BODY = {"input_file_id": "file-x", "endpoint": PATH, "completion_window": "24h"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"input_file_id": None}, "input_file_id"),
        ({"metadata": []}, "metadata"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"metadata": {"k": 1}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"metadata": {str(n): "v" for n in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at"}}, "output_expires_after"),
    ],
)
def test_a_batch_that_is_none_is_refused_by_its_field(fields: dict[str, Any], param: str):
    with pytest.raises(ApiError) as refused:
        batches.read_new_batch(orjson.dumps({**BODY, **fields}))
    assert (refused.value.status, refused.value.param) == (400, param)


def test_a_batch_and_what_is_unknown_of_it():
    new = batches.read_new_batch(orjson.dumps({**BODY, "metadata": {"a": "b"}, "other": 1}))
    assert (new.input_file, new.endpoint, new.metadata) == ("file-x", PATH, {"a": "b"})
    assert new.unknown == ("other",)


@pytest.mark.parametrize("file_id", ["file-none", "file-" + "0" * 32, "file-\x00"])
async def test_its_input_must_be_there(sqlite: Database, file_id: str):
    stage = BatchStage(sqlite)
    async with stage.gateway():
        refused = await stage.post("/v1/batches", {**BODY, "input_file_id": file_id})
    assert refused["error"]["param"] == "input_file_id"
    assert refused["error"]["code"] == "file_not_found"


async def test_a_key_that_is_revoked_while_the_body_comes_makes_no_batch(sqlite: Database):
    stage = BatchStage(sqlite)
    async with stage.gateway():
        whole = orjson.dumps({**BODY, "input_file_id": await stage.upload(lines(1))})
        owners = stage.tenants

        async def slowly() -> AsyncIterator[bytes]:
            yield whole[:5]
            stage.use({})
            yield whole[5:]

        async with stage.client() as client:
            response = await client.post("/v1/batches", content=slowly())
        assert response.status_code == 401
        stage.use(owners)
        assert (await stage.get("/v1/batches"))["data"] == []


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"limit": "0"}, "limit"),
        ({"limit": "10001"}, "limit"),
        ({"limit": "x"}, "limit"),
        ({"limit": ""}, "limit"),
        ({"order": "up"}, "order"),
        ({"after": "\0"}, "after"),
        ({"after": "batch_" + "0" * 32}, "after"),
    ],
)
def test_lists_say_which_parameter_is_wrong(query: dict[str, str], param: str):
    with pytest.raises(ApiError) as refused:
        files.read_listing(query)
    assert refused.value.param == param


def test_lists_have_bounds_of_their_own():
    assert batches.read_listing({}).limit == 20
    with pytest.raises(ApiError):
        batches.read_listing({"limit": "101"})
    everything = files.read_listing({})
    assert (everything.limit, everything.ascending, everything.after) == (10_000, False, None)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "purpose"),
        ({"purpose": "vision"}, "purpose"),
        ({"purpose": "batch", "expires_after[seconds]": "7200"}, "expires_after.anchor"),
        (
            {
                "purpose": "batch",
                "expires_after[anchor]": "created_at",
                "expires_after[seconds]": "60",
            },
            "expires_after.seconds",
        ),
        ({"purpose": "batch", "expires_after[anchor]": "created_at"}, "expires_after.seconds"),
    ],
)
def test_an_uploads_fields_are_checked(fields: dict[str, str], param: str):
    with pytest.raises(ApiError) as refused:
        files.read_upload_fields(fields)
    assert refused.value.param == param


def test_names_are_in_the_order_of_time():
    earlier, later = new_id("file-", 1.0), new_id("file-", 1.5)
    assert first_id("file-", 1.0) < earlier < first_id("file-", 1.5) < later
    assert is_id("file-", earlier)
    assert not is_id("batch_", earlier)
    for other in ("file-", earlier[:-1], earlier + "0", earlier[:-1] + "G", earlier + "\n"):
        assert not is_id("file-", other)


async def test_a_purpose_that_no_file_can_have_is_refused(database: Database):
    stage = BatchStage(database)
    async with stage.gateway(), stage.client() as client:
        response = await client.get("/v1/files?purpose=%00")
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "purpose"
        assert (await client.get("/v1/files?purpose=assistants")).json()["data"] == []
