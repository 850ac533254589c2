"""The fields of the endpoint's protocols: each that the installed clients can send is served, has
no effect, or is refused for a reason.
"""

import pytest
from anthropic.types.message_count_tokens_params import MessageCountTokensParams
from anthropic.types.message_create_params import MessageCreateParamsStreaming
from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming

from megatron_rl.rollout.agents.completions import CompletionRequest
from megatron_rl.rollout.agents.fields import ANY_TEXT, FULL_SOFTMAX, checked
from megatron_rl.rollout.agents.messages import CountRequest, MessagesRequest
from megatron_rl.rollout.agents.question import ApiError
from megatron_rl.rollout.agents.responses import ResponsesRequest

DOORS = {
    CompletionRequest: CompletionCreateParamsStreaming,
    ResponsesRequest: ResponseCreateParamsStreaming,
    MessagesRequest: MessageCreateParamsStreaming,
    CountRequest: MessageCountTokensParams,
}
LEAST = {"messages": [], "model": "m", "max_tokens": 1}


@pytest.mark.parametrize("door", DOORS)
def test_every_field_of_the_client_is_in_one_table(door):
    tables = [door.model_fields, door.without_effect, door.refused, {**FULL_SOFTMAX, **ANY_TEXT}]
    sent = DOORS[door].__annotations__
    assert len(sent) > 7
    assert {name: sum(name in table for table in tables) for name in sent} == dict.fromkeys(sent, 1)


@pytest.mark.parametrize("door", DOORS)
def test_a_refused_field_names_its_reason_and_null_is_no_value(door):
    least = {name: LEAST[name] for name in LEAST if name in door.model_fields}
    fields = checked(door, least).model_dump()
    for name, why in door.refused.items():
        with pytest.raises(ApiError) as refusal:
            checked(door, {**least, name: "x"})
        assert str(refusal.value) == f"{name} = 'x': {why}; remove it"
        assert (refusal.value.param, refusal.value.status) == (name, 400)
        assert checked(door, {**least, name: None}).model_dump() == fields
    for name in door.without_effect:
        assert checked(door, {**least, name: "x"}).model_dump() == fields


@pytest.mark.parametrize("door", [CompletionRequest, MessagesRequest])
def test_of_a_million_wrong_messages_only_the_first_is_described(door):
    """All of them would take time in which the event loop answers no one."""
    least = {field: LEAST[field] for field in LEAST if field in door.model_fields}
    with pytest.raises(ApiError) as refusal:
        checked(door, {**least, "messages": [[]] * 1000})
    assert refusal.value.__cause__.error_count() == 1
