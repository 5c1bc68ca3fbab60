"""OpenAI's own client against /v1/responses of a gateway: what it sends is read, what it gets it understands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest

from tests.gateway.responses.chat_backend import ChatBackend, call, client_of, responses_gateway
from tests.gateway.running_gateway import ADMIN, run

WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a place",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"place": {"type": "string"}},
        "required": ["place"],
        "additionalProperties": False,
    },
}


class City(pydantic.BaseModel):
    name: str
    people: int


def test_text_usage_and_what_was_asked(tmp_path: Path) -> None:
    async def main() -> None:
        backend = ChatBackend()
        async with responses_gateway(tmp_path, backend) as (_, client):
            reply = await client.responses.create(
                model="m",
                input="What is the capital?",
                instructions="Be short.",
                temperature=0.5,
                max_output_tokens=50,
                metadata={"topic": "cities"},
                reasoning={"effort": "low"},
                user="u1",
                extra_body={"top_k": 5, "seed": 1},
            )
            assert (reply.output_text, reply.status, reply.model, reply.object) == (
                "Phnom Penh.",
                "completed",
                "m",
                "response",
            )
            assert (reply.instructions, reply.metadata, reply.temperature) == ("Be short.", {"topic": "cities"}, 0.5)
            assert reply.usage is not None
            assert (reply.usage.input_tokens, reply.usage.output_tokens, reply.usage.total_tokens) == (11, 5, 16)
            assert reply.usage.input_tokens_details.cached_tokens == 4
            assert reply.usage.output_tokens_details.reasoning_tokens == 2
            sent = backend.requests[0]
            assert sent["messages"] == [
                {"role": "system", "content": "Be short."},
                {"role": "user", "content": "What is the capital?"},
            ]
            wanted = {"max_completion_tokens": 50, "reasoning_effort": "low", "top_k": 5, "seed": 1, "temperature": 0.5}
            assert {name: sent[name] for name in wanted} == wanted
            assert not {"metadata", "input", "instructions", "store"} & set(sent)

    run(main())


def test_a_stream_tells_every_event_in_order(tmp_path: Path) -> None:
    async def main() -> None:
        backend = ChatBackend(
            {
                "reasoning_content": "Hmm, think.",
                "content": "Phnom Penh.",
                "tool_calls": [call("get_weather", '{"place": "PP"}')],
            }
        )
        async with responses_gateway(tmp_path, backend) as (_, client):
            stream = await client.responses.create(model="m", input="Hi", stream=True, tools=[WEATHER])
            events = [event async for event in stream]
            assert [event.sequence_number for event in events] == list(range(len(events)))
            kinds = list(dict.fromkeys(event.type for event in events))
            assert kinds == [
                "response.created",
                "response.in_progress",
                "response.output_item.added",
                "response.content_part.added",
                "response.reasoning_text.delta",
                "response.reasoning_text.done",
                "response.content_part.done",
                "response.output_item.done",
                "response.output_text.delta",
                "response.output_text.done",
                "response.function_call_arguments.delta",
                "response.function_call_arguments.done",
                "response.completed",
            ]
            final: Any = events[-1]
            reasoning, message, function = final.response.output
            assert reasoning.content[0].text == "Hmm, think." and message.content[0].text == "Phnom Penh."
            assert (function.name, function.arguments, function.call_id) == ("get_weather", '{"place": "PP"}', "call_1")
            texts = "".join(event.delta for event in events if event.type == "response.output_text.delta")
            assert texts == final.response.output_text == "Phnom Penh."
            assert final.response.usage.total_tokens == 16
            added = [event.item.id for event in events if event.type == "response.output_item.added"]
            done = [event.item.id for event in events if event.type == "response.output_item.done"]
            assert added == done == [item.id for item in final.response.output]

    run(main())


def test_parse_and_stream_of_a_schema(tmp_path: Path) -> None:
    async def main() -> None:
        text = '{"name": "Phnom Penh", "people": 2300000}'
        backend = ChatBackend({"content": text})
        async with responses_gateway(tmp_path, backend) as (_, client):
            parsed = await client.responses.parse(model="m", input="A city", text_format=City)
            assert parsed.output_parsed == City(name="Phnom Penh", people=2300000)
            wanted = backend.requests[0]["response_format"]
            assert wanted["type"] == "json_schema" and wanted["json_schema"]["strict"] is True
            assert wanted["json_schema"]["schema"]["required"] == ["name", "people"]
            async with client.responses.stream(model="m", input="A city", text_format=City) as stream:
                kinds = [event.type async for event in stream]
                final = await stream.get_final_response()
            assert final.output_parsed == City(name="Phnom Penh", people=2300000)
            assert kinds.count("response.output_text.delta") > 3

    run(main())


@pytest.mark.parametrize("by_id", [True, False])
def test_a_loop_of_tools(tmp_path: Path, *, by_id: bool) -> None:
    """With `previous_response_id`, or with all items sent again; both become the same chat."""

    async def main() -> None:
        backend = ChatBackend(
            {
                "reasoning_content": "I need the weather.",
                "tool_calls": [
                    call("get_weather", '{"place": "PP"}', "call_abcdef0"),
                    call("get_weather", '{"place": "SR"}', "call_abcdef1"),
                ],
            },
            {"content": "Hot."},
        )
        async with responses_gateway(tmp_path, backend) as (place, client):
            question: list[Any] = [{"role": "user", "content": "Weather?"}]
            first = await client.responses.create(model="m", input=question, tools=[WEATHER], store=by_id)
            outputs: list[Any] = []
            for item in first.output:
                if item.type == "function_call":
                    said = json.dumps({"degrees": 35, "place": json.loads(item.arguments)["place"]})
                    outputs.append({"type": "function_call_output", "call_id": item.call_id, "output": said})
            assert len(outputs) == 2
            if by_id:
                second = await client.responses.create(
                    model="m", input=outputs, tools=[WEATHER], previous_response_id=first.id
                )
            else:
                again = [*question, *(item.to_dict() for item in first.output), *outputs]
                second = await client.responses.create(model="m", input=again, tools=[WEATHER], store=False)
            assert second.output_text == "Hot."
            user, assistant, *results = backend.requests[1]["messages"]
            assert user == {"role": "user", "content": "Weather?"}
            assert assistant == {
                "role": "assistant",
                "content": None,
                "reasoning_content": "I need the weather.",
                "tool_calls": [
                    call("get_weather", '{"place": "PP"}', "call_abcdef0"),
                    call("get_weather", '{"place": "SR"}', "call_abcdef1"),
                ],
            }
            assert [(each["role"], each["tool_call_id"]) for each in results] == [
                ("tool", "call_abcdef0"),
                ("tool", "call_abcdef1"),
            ]
        first_record, second_record = place.records()
        assert first_record["endpoint"] == second_record["endpoint"] == "/v1/responses"
        assert (first_record["response_id"], second_record["response_id"]) == (first.id, second.id)
        assert (
            second_record["previous_id"] == first_record["id"] and second_record["chain_id"] == first_record["chain_id"]
        )
        assert second_record["output"] == "Hot." and second_record["usage"]["total_tokens"] == 16
        assert [message["role"] for message in second_record["messages"]] == ["user", "assistant", "tool", "tool"]

    run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_stored_is_read_again_by_its_tenant_only(tmp_path: Path, *, stream: bool) -> None:
    async def main() -> None:
        async with responses_gateway(tmp_path, ChatBackend()) as (place, client):
            made: Any = await client.responses.create(model="m", input=["Hi"][0], stream=stream, metadata={"a": "b"})
            if stream:
                made = [event async for event in made][-1].response
            found = await client.responses.retrieve(made.id)
            assert found.to_dict() == made.to_dict()
            items = (await client.responses.input_items.list(made.id)).data
            assert [(item.role, item.content[0].text) for item in items] == [("user", "Hi")]  # type: ignore[union-attr]
            async with client_of(place, ADMIN) as other:
                for attempt in (
                    other.responses.retrieve(made.id),
                    other.responses.input_items.list(made.id),
                    other.responses.delete(made.id),
                ):
                    with pytest.raises(openai.NotFoundError):
                        await attempt
                with pytest.raises(openai.BadRequestError, match="previous_response_not_found"):
                    await other.responses.create(model="m", input="x", previous_response_id=made.id)
            await client.responses.delete(made.id)
            with pytest.raises(openai.NotFoundError, match="there is no response"):
                await client.responses.retrieve(made.id)

    run(main())


def test_nothing_is_kept_without_store(tmp_path: Path) -> None:
    async def main() -> None:
        async with responses_gateway(tmp_path, ChatBackend()) as (place, client):
            made = await client.responses.create(model="m", input="Hi", store=False)
            assert made.to_dict()["store"] is False
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(made.id)
            store: Any = place.gateway._responses.store
            assert store.num_entries == store.num_bytes == 0

    run(main())


def test_pages_of_input_items(tmp_path: Path) -> None:
    async def main() -> None:
        async with responses_gateway(tmp_path, ChatBackend()) as (_, client):
            given: list[Any] = [{"role": "user", "content": str(number)} for number in range(7)]
            made = await client.responses.create(model="m", input=given)
            first = await client.responses.input_items.list(made.id, limit=3, order="asc")
            assert first.has_more and [item.content[0].text for item in first.data] == ["0", "1", "2"]  # type: ignore[union-attr]
            every = [item async for item in client.responses.input_items.list(made.id, limit=3)]
            assert [item.content[0].text for item in every] == [str(number) for number in range(6, -1, -1)]  # type: ignore[union-attr]
            with pytest.raises(openai.BadRequestError, match="limit must be 1 to 100"):
                await client.responses.input_items.list(made.id, limit=0)

    run(main())


def test_an_item_reference_is_its_item(tmp_path: Path) -> None:
    async def main() -> None:
        backend = ChatBackend()
        async with responses_gateway(tmp_path, backend) as (_, client):
            made = await client.responses.create(model="m", input="Hi")
            (asked,) = (await client.responses.input_items.list(made.id)).data
            refer: Any = [
                {"type": "item_reference", "id": asked.id},
                {"id": made.output[0].id},
                {"role": "user", "content": "And?"},
            ]
            await client.responses.create(model="m", input=refer)
            assert [(each["role"], each["content"]) for each in backend.requests[1]["messages"]] == [
                ("user", "Hi"),
                ("assistant", "Phnom Penh."),
                ("user", "And?"),
            ]
            with pytest.raises(openai.BadRequestError, match=r"input\[0\] refers to 'msg_x', which is not stored here"):
                await client.responses.create(model="m", input=[{"type": "item_reference", "id": "msg_x"}])

    run(main())


def test_a_long_chain_is_the_whole_conversation(tmp_path: Path) -> None:
    async def main() -> None:
        backend = ChatBackend()
        async with responses_gateway(tmp_path, backend) as (_, client):
            previous: Any = openai.omit
            for number in range(12):
                made = await client.responses.create(
                    model="m", input=f"question {number}", previous_response_id=previous, instructions=f"rule {number}"
                )
                previous = made.id
            messages = backend.requests[-1]["messages"]
            assert messages[0] == {"role": "system", "content": "rule 11"}, "instructions are of one request only"
            asked = [each["content"] for each in messages if each["role"] == "user"]
            assert asked == [f"question {number}" for number in range(12)] and len(messages) == 1 + 12 + 11

    run(main())


def test_an_answer_that_was_cut_is_incomplete(tmp_path: Path) -> None:
    async def main() -> None:
        backend = ChatBackend()
        backend.finish_reason = "length"
        async with responses_gateway(tmp_path, backend) as (_, client):
            whole = await client.responses.create(model="m", input="Hi", max_output_tokens=2)
            events = [event async for event in await client.responses.create(model="m", input="Hi", stream=True)]
            final: Any = events[-1]
            assert final.type == "response.incomplete"
            for response in (whole, final.response):
                assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
                assert response.output[0].status == "incomplete" and response.output_text == "Phnom Penh."
                assert (await client.responses.retrieve(response.id)).status == "incomplete"

    run(main())


def test_log_probabilities(tmp_path: Path) -> None:
    async def main() -> None:
        backend = ChatBackend({"content": "ab"})
        backend.logprobs = {
            "content": [
                {
                    "token": "ab",
                    "logprob": -0.5,
                    "bytes": [97, 98],
                    "top_logprobs": [{"token": "ab", "logprob": -0.5, "bytes": None}],
                }
            ]
        }
        async with responses_gateway(tmp_path, backend) as (_, client):
            include: Any = ["message.output_text.logprobs"]
            whole: Any = await client.responses.create(model="m", input="Hi", include=include, top_logprobs=2)
            (each,) = whole.output[0].content[0].logprobs
            assert (each.token, each.logprob, each.top_logprobs[0].bytes) == ("ab", -0.5, [])
            assert (backend.requests[0]["logprobs"], backend.requests[0]["top_logprobs"]) == (True, 2)
            stream = await client.responses.create(model="m", input="Hi", stream=True, include=include)
            events: list[Any] = [event async for event in stream]
            told = [event.logprobs[0].token for event in events if event.type == "response.output_text.delta"]
            assert told == ["ab"] and events[-1].response.output[0].content[0].logprobs[0].logprob == -0.5

    run(main())
